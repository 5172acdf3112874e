"""Moves bytes between processes by Mooncake's TransferEngine: over RDMA, or over TCP without it.

One side offers bytes in registered memory, and says where they are. The other side reads them, and
the first one keeps them until it hears so. Both words go by another way, such as a process group.

https://github.com/kvcache-ai/Mooncake; SGLang moves KV by it between prefill and decode servers.
Imports no SGLang.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    import torch

# bytes of a word that says where an offer is
WORD_BYTES = 256
_LENGTH_BYTES = 2
# tags of messages of gloo's: others have 0
_WORD_TAG, _READ_TAG = 1, 2
_CARDS = "/sys/class/infiniband"
# Mooncake's own variable
_FORCE_TCP = "MC_FORCE_TCP"


class _Offer(msgspec.Struct, array_like=True):
    """Where bytes are: the engine that has them registered, and their address in its process."""

    engine: str
    address: int
    nbytes: int


class Mooncake:
    """The engine of this process. Any thread may call it.

    Registering memory takes as long as moving it. So pieces are kept registered, and bytes are
    copied from and to them. A piece whose transfer has failed is never used again: the other side
    may still read or write it.
    """

    def __init__(self, host: str) -> None:
        """``host``: this machine's address for the other side.

        Raises ``Refused`` without Mooncake.
        """
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise Refused(
                f"Mooncake is not installed ({error}): install mooncake-transfer-engine, and the "
                "libraries of libibverbs"
            ) from error
        self._engine: Any = TransferEngine()
        protocol = "tcp" if is_tcp() else "rdma"
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise Refused(f"Mooncake's engine does not start at {host!r} by {protocol}")
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        # free pieces
        self._pieces: list[torch.Tensor] = []

    @contextmanager
    def offered(self, content: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the word by which the other side reads ``content``, until the end of the block."""
        import torch

        # TCP reads the host's memory
        device = torch.device("cpu") if is_tcp() else content.device
        with self._piece(content.nbytes, device) as piece:
            piece.copy_(content)
            if piece.is_cuda:
                torch.cuda.current_stream(piece.device).synchronize()
            yield _pack(_Offer(self._name, piece.data_ptr(), content.nbytes))

    def read(self, word: torch.Tensor, into: torch.Tensor) -> None:
        """Read the bytes of ``word`` into ``into``. Raises ``RuntimeError`` if that fails."""
        offer = _unpack(word)
        if offer.nbytes != into.nbytes:
            raise RuntimeError(f"{offer.nbytes} bytes are offered, and {into.nbytes} were due")
        with self._piece(into.nbytes, into.device) as piece:
            failed = self._engine.transfer_sync_read(
                offer.engine, piece.data_ptr(), offer.address, offer.nbytes
            )
            if failed:
                raise RuntimeError(f"Mooncake could not read from {offer.engine}")
            into.copy_(piece)

    @contextmanager
    def _piece(self, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield registered memory."""
        import torch

        with self._lock:
            fitting = [
                at
                for at, each in enumerate(self._pieces)
                if each.nbytes >= nbytes and each.device == device
            ]
            piece = self._pieces.pop(fitting[0]) if fitting else None
        if piece is None:
            piece = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if self._engine.register_memory(piece.data_ptr(), piece.nbytes):
                raise RuntimeError(f"Mooncake cannot register {piece.nbytes} bytes of memory")
        try:
            yield piece[:nbytes]
        except BaseException:
            _abandoned.append(piece)
            raise
        with self._lock:
            self._pieces.append(piece)


# pieces that somebody may still read or write
_abandoned: list[torch.Tensor] = []


def is_tcp() -> bool:
    """Return whether this machine has no card for RDMA, or is told not to use it."""
    return os.environ.get(_FORCE_TCP) == "1" or not os.path.isdir(_CARDS)


_engines: dict[str, Mooncake] = {}
_starting = threading.Lock()


def mooncake_at(host: str) -> Mooncake:
    """Return this process's engine at ``host``. Raises ``Refused``."""
    with _starting:
        if host not in _engines:
            _engines[host] = Mooncake(host)
        return _engines[host]


def send_by(engine: Mooncake, group: Any, rank: int, content: torch.Tensor) -> None:
    """Offer ``content`` to ``rank`` of the process group ``group``, and wait until it is read."""
    with engine.offered(content) as word:
        group.send([word], rank, _WORD_TAG).wait()
        group.recv([_memory(1)], rank, _READ_TAG).wait()


def receive_by(engine: Mooncake, group: Any, rank: int, into: torch.Tensor) -> None:
    """Fill ``into`` with what ``rank`` of the process group ``group`` offers."""
    word = _memory(WORD_BYTES)
    group.recv([word], rank, _WORD_TAG).wait()
    engine.read(word, into)
    group.send([_memory(1)], rank, _READ_TAG).wait()


def _memory(nbytes: int) -> torch.Tensor:
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8)


def _pack(offer: _Offer) -> torch.Tensor:
    import torch

    content = msgspec.msgpack.encode(offer)
    whole = len(content).to_bytes(_LENGTH_BYTES, "little") + content
    return torch.frombuffer(bytearray(whole.ljust(WORD_BYTES, b"\0")), dtype=torch.uint8)


def _unpack(word: torch.Tensor) -> _Offer:
    whole = word.numpy().tobytes()
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(whole[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Offer)
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"the word of an offer cannot be read: {error}") from error
