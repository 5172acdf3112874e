"""A trainer process that sends one checkpoint repeatedly.

The patched server gets ``non_blocking`` updates. Upstream gets the calls of its own clients: pause
in place, begin, send, end, continue, with the cache kept. Both get the same bytes by the same
calls. vLLM on a CPU can only load from disk: pause, reload, resume. The sent weights equal the
served ones: an update's cost does not depend on the values, and the streams stay the same
throughout.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import httpx
import torch

from benchmarks.common.models import WEIGHTS
from benchmarks.common.peers import CLASSES, Kind, Peer
from examples.stories.weights import changes_between
from harness.starting import forked_children
from sglang_inflight.client.buckets import Bucket, Piece, fill_buckets
from sglang_inflight.client.trainer_group import POLL_S, TrainerGroup

Transport = Literal["disk", "tensor", "distributed"]
# ways of many small tensors
Small = Literal["disk", "bucket", "value", "broadcast"]
# phases of an update: before the first byte, amid the bytes, before the commit, after its answer
Phase = Literal["begun", "sending", "staged", "committed"]

GROUP = "benchmark"
BUCKET_BYTES = 16 << 20
JOIN_S = 120.0
SMALL_POLL_S = 0.0001
# bytes that ``copy_memory`` copies at a time, some tenths of a millisecond
COPIED_BYTES = 1 << 20
_SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Update:
    sent: float  # time.perf_counter(), shared by all processes of a machine
    # time when the trainer had sent everything; for a checkpoint on disk, the time of the call
    last_byte: float
    answered: float
    # the answer to the last call: of ours the receipt
    receipt: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.answered - self.sent

    @property
    def stall_ms(self) -> float | None:
        """Milliseconds the loop was held, by the receipt."""
        return self.receipt.get("stall_ms")


class Trainer:
    """The benchmark's side of the trainer process."""

    def __init__(self, connection: Connection, process: SpawnProcess) -> None:
        self._connection = connection
        self._process = process

    def update(self, transport: Transport, mode: str | None = None) -> Update:
        """Send the checkpoint, and wait until it is live.

        ``mode`` is a server's mode of a pause around the update. Without it, ours makes no pause,
        and the peers make one that leaves running requests as they are. ``recompute`` is ours
        alone: no pause, and the commit retracts running requests.
        """
        return self._order("update", transport, mode)

    def update_until(self, transport: Transport, phase: Phase) -> None:
        """Begin an update, and return when it is in ``phase``. It goes no further.

        In ``sending``, a broadcast is being sent.
        """
        self._connection.send(("update_until", (transport, phase)))
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        assert answer == phase

    def kill(self) -> float:
        """End the process by SIGKILL, and return the ``time.perf_counter()`` of it."""
        at = time.perf_counter()
        self._process.kill()
        self._process.join()
        return at

    def load_checkpoint(self, checkpoint: Path) -> Update:
        """Let the server load another checkpoint from disk, and wait until it is live."""
        return self._order("load_checkpoint", checkpoint)

    def patch(self, served: Path, checkpoint: Path) -> Update:
        """Send where ``checkpoint`` differs from ``served``, and wait until it is live.

        Upstream has no such call.
        """
        return self._order("patch", served, checkpoint)

    def send_small(self, transport: Small) -> Update:
        """Send the checkpoint tensor by tensor, and wait until it is live.

        ``disk`` writes it into a folder of its own before; ``bucket`` broadcasts all of them side
        by side, in a layout that our server keeps; ``value`` pickles tensors one by one into one
        payload; ``broadcast`` sends one broadcast per tensor, for a single call. Upstream is paused
        meanwhile.
        """
        return self._order("send_small", transport)

    def copy_memory(self, seconds: float, share: float = 1.0) -> Update:
        """Copy the checkpoint's bytes in this process's memory, spread over ``seconds``.

        No server takes part. As many bytes are read as an update brings, and as many written;
        or a ``share`` of them.
        """
        return self._order("copy_memory", seconds, share)

    def send_by_value(self, nbytes: int) -> Update:
        """Send tensors of ``nbytes`` in all, pickled into one body, and wait until they are live.

        Upstream's calls block: they wait for running requests, and new ones wait for them.
        """
        return self._order("send_by_value", nbytes)

    def _order(self, call: str, *arguments: object) -> Update:
        self._connection.send((call, arguments))
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Update)
        return answer


@contextlib.contextmanager
def trainer(peer: Peer, model: Path, *, bytes_per_s: float = 0) -> Iterator[Trainer]:
    """Start a trainer. ``bytes_per_s`` limits the link of ``distributed``; 0 sets no limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(theirs, peer.kind, peer.url, model, bytes_per_s), daemon=True
    )
    with forked_children():
        process.start()
    theirs.close()
    try:
        yield Trainer(ours, process)
    finally:
        process.kill()
        process.join()


# ---- the trainer process ------------------------------------------------------------


def _run(orders: Connection, kind: Kind, url: str, model: Path, bytes_per_s: float) -> None:
    torch.set_num_threads(1)
    # handles any process can open, not only a child of this one
    torch.multiprocessing.set_sharing_strategy("file_system")
    with httpx.Client(base_url=url, timeout=600) as client:
        sender = _Sender(client, model, kind, bytes_per_s=bytes_per_s, tell=orders.send)
        while True:
            try:
                call, arguments = orders.recv()
                orders.send(getattr(sender, call)(*arguments))
            except EOFError:
                return
            except Exception as error:
                orders.send(RuntimeError(f"{type(error).__name__}: {error}"))


class _Sender:
    def __init__(
        self,
        client: httpx.Client,
        model: Path,
        kind: Kind,
        *,
        bytes_per_s: float,
        tell: Callable[[object], None],
    ) -> None:
        self._client = client
        self._model = model
        self._kind = kind
        self._bytes_per_s = bytes_per_s
        self._tell = tell
        self._how = {"non_blocking": True} if kind == "ours" else {}
        self._until: Phase | None = None
        self._flushes = False
        self._weights: Named | None = None
        self._buckets: list[Bucket] = []
        self._group: TrainerGroup | None = None
        self._count = 0
        self._last_byte = 0.0
        self._by_value = b""
        # digests of layouts that the server has
        self._known_layouts: set[str | None] = set()
        self._copied = b""
        self._copy = bytearray()

    def update(self, transport: Transport, mode: str | None = None) -> Update:
        self._count += 1
        pieces = self._prepare(transport)
        sent = self._last_byte = time.perf_counter()
        # running requests that stay as they are keep their KV
        self._flushes = mode not in (None, "in_place", "keep")
        is_in_flight = self._kind == "ours" and mode in (None, "recompute")
        with contextlib.nullcontext() if is_in_flight else self._paused(mode):
            receipt = self._from_disk(self._model) if transport == "disk" else self._session(pieces)
        answered = time.perf_counter()
        return Update(sent, self._last_byte, answered, receipt)

    def update_until(self, transport: Transport, phase: Phase) -> None:
        self._until = phase
        self.update(transport)
        raise RuntimeError(f"the update was never in {phase!r}")

    def load_checkpoint(self, checkpoint: Path) -> Update:
        self._model = checkpoint
        return self.update("disk")

    def patch(self, served: Path, checkpoint: Path) -> Update:
        self._count += 1
        payload = _serialize(list(changes_between(served, checkpoint)))
        body = {"serialized_named_tensors": [payload], "load_format": "sparse"}
        sent = time.perf_counter()
        receipt = self._post("/update_weights_from_tensor", {**body, **self._label(), **self._how})
        return Update(sent, sent, time.perf_counter(), receipt)

    def send_small(self, transport: Small) -> Update:
        self._count += 1
        with contextlib.ExitStack() as stack:
            if transport == "disk":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                send = partial(self._small_from_disk, self._written_anew(folder))
            elif transport == "value":
                # each tensor with memory of its own, like a trainer's
                content = pickle.dumps([(name, tensor.clone()) for name, tensor in self._load()])
                send = partial(self._small_by_value, base64.b64encode(content).decode())
            elif transport == "bucket":
                (bucket,) = self._prepare_bucket()
                self._group = self._group or self._join_group()
                send = partial(self._small_by_bucket, self._group, bucket)
            else:
                self._group = self._group or self._join_group()
                send = partial(self._small_by_broadcast, self._group, self._load())
            sent = time.perf_counter()
            receipt = self._blocking(send, transport) if self._kind == "upstream" else send()
            return Update(sent, self._last_byte, time.perf_counter(), receipt)

    def copy_memory(self, seconds: float, share: float) -> Update:
        if not self._copied:
            self._copied = (self._model / WEIGHTS).read_bytes()
            # written once before, so that no page is new to this process
            self._copy = bytearray(self._copied)
        nbytes = round(share * len(self._copied))
        source, target = memoryview(self._copied)[:nbytes], memoryview(self._copy)[:nbytes]
        sent = time.perf_counter()
        for start in range(0, len(source), COPIED_BYTES):
            due = sent + seconds * start / nbytes
            time.sleep(max(0.0, due - time.perf_counter()))
            end = start + COPIED_BYTES
            target[start:end] = source[start:end]
        last_byte = time.perf_counter()
        time.sleep(max(0.0, sent + seconds - last_byte))
        return Update(sent, last_byte, time.perf_counter(), {})

    def _written_anew(self, folder: Path) -> Path:
        """Return a copy of the checkpoint, which no writing of pages to the disk follows."""
        copy = shutil.copytree(self._model, folder / f"v{self._count}")
        os.sync()
        return copy

    def _blocking(self, send: Callable[[], dict[str, Any]], transport: Small) -> dict[str, Any]:
        """Send to upstream, which makes no step meanwhile, and takes tensors in a session alone."""
        with self._paused(None):
            if transport == "disk":
                return send()
            self._post("/begin_weight_update", {})
            receipt = send()
            self._post("/end_weight_update", {})
            return receipt

    def _small_from_disk(self, checkpoint: Path) -> dict[str, Any]:
        self._last_byte = time.perf_counter()
        return self._from_disk(checkpoint)

    def _small_by_value(self, payload: str) -> dict[str, Any]:
        body = {"serialized_named_tensors": [payload], **self._label(), **self._how}
        self._last_byte = time.perf_counter()
        return self._post("/update_weights_from_tensor", body)

    def _prepare_bucket(self) -> list[Bucket]:
        pieces = (Piece.whole(name, tensor) for name, tensor in self._load())
        return list(fill_buckets(pieces, 1 << 40, "cpu"))

    def _small_by_bucket(self, group: TrainerGroup, bucket: Bucket) -> dict[str, Any]:
        body = {**bucket.describe(), "group_name": GROUP, **self._label(), **self._how}
        if self._kind == "ours" and bucket.layout_digest in self._known_layouts:
            for name in ("names", "dtypes", "shapes"):
                del body[name]
        with self._while_posting("/update_weights_from_distributed", body) as answers:
            is_sent = group.broadcast(bucket.flat)
            while not is_sent():
                time.sleep(SMALL_POLL_S)
            self._last_byte = time.perf_counter()
        self._known_layouts.add(bucket.layout_digest)
        (receipt,) = answers
        return receipt

    def _small_by_broadcast(self, group: TrainerGroup, pairs: Named) -> dict[str, Any]:
        body = {
            "names": [name for name, _ in pairs],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
            "shapes": [list(tensor.shape) for _, tensor in pairs],
            "group_name": GROUP,
            **self._label(),
            **self._how,
        }
        with self._while_posting("/update_weights_from_distributed", body) as answers:
            for _, tensor in pairs:
                is_sent = group.broadcast(tensor)
                while not is_sent():
                    time.sleep(SMALL_POLL_S)
            self._last_byte = time.perf_counter()
        (receipt,) = answers
        return receipt

    def send_by_value(self, nbytes: int) -> Update:
        if not self._by_value:
            pairs: Named = []
            weights = itertools.cycle(self._load())
            while sum(tensor.nbytes for _, tensor in pairs) < nbytes:
                name, tensor = next(weights)
                pairs.append((name, tensor.clone()))
            payload = base64.b64encode(pickle.dumps(pairs)).decode()
            body = {"serialized_named_tensors": [payload], "flush_cache": False, **self._how}
            self._by_value = json.dumps(body).encode()
        sent = time.perf_counter()
        if self._kind == "upstream":  # refuses tensors outside of a session
            self._post("/begin_weight_update", {})
        receipt = self._answer(
            "/update_weights_from_tensor",
            content=self._by_value,
            headers={"Content-Type": "application/json"},
        )
        if self._kind == "upstream":
            self._post("/end_weight_update", {})
        return Update(sent, sent, time.perf_counter(), receipt)

    # ---- preparation, before the clock starts ------------------------------------------

    def _prepare(self, transport: Transport) -> list[Any]:
        if transport == "disk":
            return []
        weights = self._load()
        if not self._buckets:
            pieces = (Piece.whole(name, tensor) for name, tensor in weights)
            self._buckets = list(fill_buckets(pieces, BUCKET_BYTES, "cpu"))
        if transport == "tensor":
            return [_serialize(weights)]
        if self._group is None:
            self._group = self._join_group()
        return self._buckets

    def _load(self) -> Named:
        if self._weights is None:
            from safetensors.torch import load_file

            self._weights = list(load_file(self._model / WEIGHTS).items())
        return self._weights

    def _join_group(self) -> TrainerGroup:
        group = TrainerGroup(GROUP, 1, backend="gloo", timeout_s=JOIN_S)
        body = {
            "master_address": "127.0.0.1",
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": GROUP,
            "backend": "gloo",
        }
        with self._while_posting("/init_weights_update_group", body):
            group.form().result()
        if self._bytes_per_s:
            _hold_links(round(self._bytes_per_s))
        return group

    # ---- sending ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _paused(self, mode: str | None) -> Iterator[None]:
        peer = CLASSES[self._kind]
        self._post(*peer.pause_call(mode))
        yield
        self._post(peer.resume_path, {})

    def _from_disk(self, checkpoint: Path) -> dict[str, Any]:
        if self._kind == "vllm":
            to = {"weights_path": str(checkpoint)}
            return self._post("/collective_rpc", {"method": "reload_weights", "kwargs": to})
        body = {"model_path": str(checkpoint), **self._label(), **self._how}
        return self._post("/update_weights_from_disk", body)

    def _session(self, pieces: list[Any]) -> dict[str, Any]:
        begun = self._post("/begin_weight_update", self._how)
        # upstream's sessions have no id
        named = {name: begun[name] for name in ("session_id",) if name in begun}
        self._reach("begun")
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                body = {"serialized_named_tensors": [piece], **self._label(), **self._how, **named}
                self._last_byte = time.perf_counter()
                self._post("/update_weights_from_tensor", body)
            else:
                self._broadcast(piece, named, is_half_way=number == len(pieces) // 2)
        self._reach("staged")
        receipt = self._post("/end_weight_update", {**self._how, **named})
        self._reach("committed")
        return receipt

    def _reach(self, phase: Phase, *, goes_on: bool = False) -> None:
        """Tell that the update is in ``phase`` and, unless it goes on, wait there for our end."""
        if self._until == phase:
            self._tell(phase)
            while not goes_on:
                time.sleep(1)

    def _broadcast(self, bucket: Bucket, named: dict[str, Any], *, is_half_way: bool) -> None:
        body = {
            **bucket.describe(),
            "group_name": GROUP,
            **self._label(),
            **self._how,
            **named,
        }
        assert self._group is not None
        with self._while_posting("/update_weights_from_distributed", body):
            is_sent = self._group.broadcast(bucket.flat)
            if is_half_way:
                self._reach("sending", goes_on=True)
            while not is_sent():
                time.sleep(POLL_S)
            self._last_byte = time.perf_counter()

    def _label(self) -> dict[str, Any]:
        return {"weight_version": f"v{self._count}", "flush_cache": self._flushes}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._answer(path, json=body)

    def _answer(self, path: str, **content: Any) -> dict[str, Any]:
        response = self._client.post(path, **content)
        answer: dict[str, Any] = response.json()
        if response.status_code != 200 or not answer.get("success", True):
            raise RuntimeError(f"{path}: {response.status_code} {answer}")
        return answer

    @contextlib.contextmanager
    def _while_posting(self, path: str, body: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
        """Post a collective call during the block. The answer comes after both have taken part."""
        failures: list[Exception] = []
        answers: list[dict[str, Any]] = []

        def post() -> None:
            try:
                answers.append(self._post(path, body))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=post)
        thread.start()
        yield answers
        thread.join()
        if failures:
            raise failures[0]


def _serialize(tensors: Named) -> str:
    """Return handles of shared memory, as a payload."""
    from sglang.srt.utils import MultiprocessingSerializer

    payload: str = MultiprocessingSerializer.serialize(tensors, output_str=True)
    return payload


def _hold_links(bytes_per_s: int) -> None:
    """Let the kernel pace each TCP connection of this process, like a slow wire."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # not a socket, or closed since the listing
        with connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(
                    socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s)
                )
