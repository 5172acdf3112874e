"""A process group of a trainer's ranks, or of its rank 0, and the ranks of its servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from sglang_inflight.mooncake import Mooncake, send_by
from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore, Work

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")

# time for an abandoned broadcast to fail after its receivers have left
FAILS_S = 2.0
POLL_S = 0.001
_FAILED = "inflight/failed"
# torch keeps a backend's addresses under this device's name
_DEVICE = {"gloo": "cpu", "nccl": "cuda"}

# gloo's groups with an unreceived broadcast, kept forever: freeing one would wait for receivers
_stuck: list[TrainerGroup] = []


def choose_backend(wanted: Backend | None) -> Backend:
    """Return ``wanted``, or by default NCCL if this process has a GPU, else gloo."""
    import torch

    return wanted or ("nccl" if torch.cuda.is_available() else "gloo")


class TrainerGroup:
    """A trainer's side of the group. Listens from the start, and is formed by ``form``.

    The group uses torch's backends directly. So it does not enter torch's table of groups, shared
    with the trainer's own groups. No variable of ``torchrun`` chooses its store.

    Belongs to one thread. Calls into torch that may block forever run in abandonable threads:
    forming, and the start of NCCL's first broadcast. Both connect through the store, and ``leave``
    closes the store to end these threads.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        *,
        backend: Backend,
        timeout_s: float,
        rank: int = 0,
        trainers: int = 1,
        master: tuple[str, int] | None = None,
    ) -> None:
        """Listen for ``ranks`` ranks of servers. ``timeout_s`` is the time limit of forming.

        Of ``trainers`` ranks this is ``rank``. All but rank 0 connect to ``master``, where rank 0
        listens: its address and ``port``.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._name = name
        self._size = trainers + ranks
        self._rank = rank
        self._backend: Backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        here = "127.0.0.1"
        self._master: TCPStore | None = None
        if master is None:
            self._master = TCPStore(
                here, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
            master = here, self._master.port
        self.port: int = master[1]
        # not the master itself: a thread stuck in torch would keep the master listening
        self._store: Store = TCPStore(*master, wait_for_workers=False, timeout=self._timeout)
        # another connection: a call waits for one of another thread, and forming may wait long
        self._words = TCPStore(*master, wait_for_workers=False, timeout=self._timeout)
        for prefix in (name, f"{name}/", f"{_DEVICE[backend]}/"):
            self._store = PrefixStore(prefix, self._store)
        # a backend of torch's, untyped
        self._formed: Any = None
        self._work: Work | None = None
        # sends that have not ended
        self._sends: list[Future[None]] = []

    def address_for(self, server: str) -> str:
        """Return this machine's address on its route to the server's URL."""
        url = urlsplit(server)
        port = url.port or (443 if url.scheme == "https" else 80)
        family, kind, _, _, where = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_DGRAM)[
            0
        ]
        # connect() on a datagram socket sends nothing; it asks the routing table
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address: str = probe.getsockname()[0]
        return address

    def join_of(self, server: str, rank_offset: int, address: str | None) -> dict[str, Any]:
        """Return the fields of the call by which a server's ranks join, from ``rank_offset`` on.

        ``address`` is this machine's for the server's URL; None: that of its route there.
        """
        return {
            "master_address": address or self.address_for(server),
            "master_port": self.port,
            "rank_offset": rank_offset,
            "world_size": self._size,
            "group_name": self._name,
            "backend": self._backend,
        }

    def form(self) -> Future[None]:
        """Start forming the group. The future is done when every rank has joined."""

        def meet() -> None:
            import torch.distributed as dist

            if self._backend == "gloo":
                self._formed = dist.ProcessGroupGloo(
                    self._store, self._rank, self._size, self._timeout
                )
                return
            options = dist.ProcessGroupNCCL.Options()
            # callers limit their waits themselves: NCCL's own timeout ends the process
            options._timeout = NEVER
            with errors_cost_the_group_only():
                self._formed = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)

        return _in_thread(meet)

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Start a broadcast. Call the returned function until it returns true.

        The function raises ``RuntimeError`` if the broadcast failed. Until then the tensor must
        not change, nor the sources of copies into it still pending on the current stream.
        """
        begun = _in_thread(self._begin(tensor))

        def is_sent() -> bool:
            if not begun.done() or not begun.result().is_completed():
                return False
            work = begun.result()
            # NCCL's wait() does not raise its watchdog's error; gloo's wait() raises
            if self._backend == "nccl" and (failure := work.exception()) is not None:
                raise RuntimeError(f"{failure}")
            work.wait()
            return True

        return is_sent

    def fail(self, why: str) -> None:
        """Have ``why_failed`` say ``why`` on all ranks of the trainer."""
        with contextlib.suppress(RuntimeError):
            self._words.set(_FAILED, why)

    def why_failed(self) -> str | None:
        """Return why another rank of the trainer has failed, or rank 0's store; None if neither."""
        try:
            return self._words.get(_FAILED).decode() if self._words.check([_FAILED]) else None
        except RuntimeError as error:
            return f"rank 0 of the trainer is gone: {error}"

    def send(
        self,
        tensor: torch.Tensor,
        receiver: int,
        engine: Callable[[], Mooncake] | None = None,
    ) -> Future[None]:
        """Start to send ``tensor`` to the rank ``receiver`` of the group.

        With ``engine`` the bytes go by Mooncake, and the group has the words.

        The future is done when the rank has received it, or fails with ``RuntimeError``. Until then
        the tensor must not change.
        """
        assert self._formed is not None
        group = self._formed
        stream = _stream_of(tensor)

        def send() -> None:
            import torch

            if engine is not None:
                with torch.cuda.stream(stream):
                    send_by(engine(), group, receiver, tensor)
                return
            if stream is None:
                group.send([tensor], receiver, 0).wait()
                return
            with torch.cuda.stream(stream):
                # the receiver does so, too: NCCL then uses the group's communicator
                group._start_coalescing(tensor.device)
                group.send([tensor], receiver, 0)
                group._end_coalescing(tensor.device).wait()
            stream.synchronize()

        sent = _in_thread(send)
        self._sends = [each for each in self._sends if not each.done()] + [sent]
        return sent

    def _begin(self, tensor: torch.Tensor) -> Callable[[], Work]:
        import torch
        import torch.distributed as dist

        assert self._formed is not None
        group, options = self._formed, dist.BroadcastOptions()
        options.rootRank = 0
        stream = _stream_of(tensor)

        def begin() -> Work:
            with torch.cuda.stream(stream):
                self._work = group.broadcast([tensor], options)
            return self._work

        return begin

    def leave(self) -> None:
        """End the group, even with a broadcast in flight. Let the ranks leave first if possible."""
        self._master = None
        if self._formed is None:
            return
        if self._backend == "nccl":
            self._formed.abort()
        elif not self._is_quiet():
            _stuck.append(self)

    def _is_quiet(self) -> bool:
        deadline = time.monotonic() + FAILS_S
        while not all(sent.done() for sent in self._sends) or not (
            self._work is None or self._work.is_completed()
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _stream_of(tensor: torch.Tensor) -> Any:
    """Return the stream of ``tensor``, for another thread: the current stream is a thread's own."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _in_thread(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="inflight-sender", daemon=True).start()
    return future
