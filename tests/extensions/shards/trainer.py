"""The ranks of a sharded trainer, each a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from harness import marker
from harness.server import Server
from harness.starting import forked_children
from sglang_inflight.client import Client, Fleet, Sender, ShardSender, shard_sender
from sglang_inflight.client import Shard as Told
from sglang_inflight.client.report import Report
from tests.support import block_fp8, mla, moe

Tensors = dict[str, Any]
# a busy machine starts processes slowly
PATIENCE_S = 300.0
BUCKET_BYTES = 4 << 10
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Layout:
    """How a trainer of ``mesh`` ranks holds a tensor of a number of dimensions."""

    mesh: tuple[int, ...]
    placements: Callable[[int], Sequence[Placement]]

    @property
    def ranks(self) -> int:
        return torch.Size(self.mesh).numel()


def _rows_and_columns(dims: int) -> Sequence[Placement]:
    return [Shard(0), Shard(1) if dims > 1 else Replicate()]


LAYOUTS = {
    "one": Layout((1,), lambda dims: [Replicate()]),
    "rows": Layout((2,), lambda dims: [Shard(0)]),
    # uneven: no size is a multiple of three
    "rows of three": Layout((3,), lambda dims: [Shard(0)]),
    "columns": Layout((2,), lambda dims: [Shard(dims - 1)]),
    "rows and columns": Layout((2, 2), _rows_and_columns),
    "replicas of rows": Layout((2, 2), lambda dims: [Replicate(), Shard(0)]),
    "rows twice": Layout((2, 2), lambda dims: [Shard(0), Shard(0)]),
}
MODELS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "marker": marker.tensors,
    "stages": partial(marker.tensors, layers=2),
    "moe": moe.tensors,
    "mla": mla.tensors,
    "fp8": block_fp8.tensors,
}
# told by hand: each rank has some rows, as Megatron's ranks do
BY_HAND = "by hand"
# the same, and the ranks have each other's rows
SWAPPED = "by hand, swapped"


def held(layout: str, tensors: Tensors, rank: int) -> Tensors:
    """Return what ``rank`` has of ``tensors``."""
    if layout in (BY_HAND, SWAPPED):
        found, half = {}, 1 - rank if layout == SWAPPED else rank
        for name, tensor in tensors.items():
            low, high = (len(tensor) * at // 2 for at in (half, half + 1))
            starts = (low, *[0] * (tensor.dim() - 1))
            found[name] = Told(tensor[low:high], starts, tuple(tensor.shape))
        return found
    known = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", known.mesh)
    return {
        name: distribute_tensor(tensor, mesh, known.placements(tensor.dim()))
        for name, tensor in tensors.items()
    }


def ranks_of(layout: str) -> int:
    return 2 if layout in (BY_HAND, SWAPPED) else LAYOUTS[layout].ranks


def _run(
    rank: int,
    ranks: int,
    port: int,
    urls: Sequence[str],
    options: dict[str, Any],
    orders: Any,
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_S)
    )
    client: Client | Fleet | None = None
    if rank == 0:
        client = Client(*urls) if len(urls) == 1 else Fleet(urls)
    sender: ShardSender[Any] = ShardSender(client, **{"bucket_bytes": BUCKET_BYTES} | options)
    while (order := orders.get()) is not None:
        try:
            answers.put((rank, None, _send(sender, rank, **order)))
        except BaseException as error:
            answers.put((rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None))
    sender.leave()
    if client is not None:
        client.close()
    dist.destroy_process_group()
    answers.close()
    answers.join_thread()
    # freeing all that SGLang imported takes as long as a send
    os._exit(0)


def _send(
    sender: Any,
    rank: int,
    *,
    layout: str,
    version: int,
    change: Callable[[int, Tensors], None] = lambda rank, tensors: None,
    dies: tuple[int, int] | None = None,
    does: Callable[[int], None] = lambda rank: None,
    on_busy: str = "wait",
    model: str = "marker",
) -> Any:
    """``dies``: a rank, and the number of buckets after which it is killed.

    ``does`` is called on each rank before it sends.
    """
    tensors = dict(MODELS[model](version))
    change(rank, tensors)
    shards = held(layout, tensors, rank)
    if dies is not None and dies[0] == rank:
        after_buckets(dies[1], partial(os.kill, os.getpid(), signal.SIGKILL))
    does(rank)
    receipt = sender.send(shards.items(), weight_version=f"v{version}", on_busy=on_busy)
    if receipt is None:
        return None
    if isinstance(receipt, Report):
        return {url: digests_of(answer) for url, answer in receipt.answers.items()}
    known = {name: receipt[name] for name in ("tensors", "bytes")}
    return {**known, "digests": digests_of(receipt), "takes_changes": sender._takes_changes}


def after_buckets(count: int, do: Callable[[], object]) -> None:
    """Have this rank call ``do`` once, after ``count`` buckets, before it packs another one."""
    pack, packed = vars(shard_sender)["pack"], itertools.count()

    def pack_after(*args: Any) -> torch.Tensor:
        if next(packed) == count:
            do()
        return pack(*args)

    vars(shard_sender)["pack"] = pack_after


def digests_of(receipt: Any) -> list[str]:
    """Return the digest of each rank's weights after the commit."""
    return [rank["digest"] for rank in receipt["ranks"]]


def whole_digests(server: Server, tensors: Tensors) -> list[str]:
    """Return the digests of the ranks after an update with whole tensors."""
    with Client(server.url) as client, Sender(client) as sender:
        return digests_of(sender.send(tensors.items(), weight_version="whole"))


def make_random(rank: int, tensors: Tensors) -> None:
    """Give ``tensors`` contents of which no two elements are equal, the same on every rank."""
    random = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        tensors[name] = torch.randn(tensor.shape, generator=random).to(tensor.dtype)


def scatter(_: int, tensors: Tensors) -> None:
    """Change a fiftieth of each random tensor, and all of one."""
    make_random(0, tensors)
    random = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            continue
        at = torch.randperm(tensor.numel(), generator=random)[: 1 + tensor.numel() // 50]
        changed = tensor.clone()
        changed.view(-1)[at] *= 1.5
        # the sign of a zero is a change
        changed.view(-1)[at[0]] = -0.0
        tensors[name] = changed
    if NORM in tensors:
        tensors[NORM] = tensors[NORM] * 1.5


class Trainer:
    """Processes of one trainer. Each order goes to all of them."""

    def __init__(self, urls: Sequence[str], ranks: int, options: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._answers = spawn.Queue()
        self._orders = [spawn.Queue() for _ in range(ranks)]
        self.processes = [
            spawn.Process(
                target=_run,
                args=(
                    rank,
                    ranks,
                    self._store.port,
                    urls,
                    options,
                    self._orders[rank],
                    self._answers,
                ),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        with forked_children():
            for process in self.processes:
                process.start()

    def send(self, **order: Any) -> dict[int, Any]:
        """Send a version from all ranks. Return what rank 0 got, and the others' None."""
        self.begin(**order)
        return self.end()

    def begin(self, **order: Any) -> None:
        for orders in self._orders:
            orders.put(order)

    def end(self, count: int | None = None) -> dict[int, Any]:
        """Return the answers of ``count`` ranks, by default of all. Raises ``Failed``."""
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for _ in range(count or len(self.processes)):
            try:
                rank, why, answer = self._answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"only ranks {sorted(found | failed)} answered") from None
            if why is None:
                found[rank] = answer
            else:
                failed[rank] = why
        if failed:
            raise Failed(failed)
        return found

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self.processes:
            process.join(PATIENCE_S)
            process.kill()


class Failed(Exception):
    """Errors by rank."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {why}" for rank, why in by_rank.items()))
        self.by_rank = by_rank


@contextmanager
def trainer(urls: str | Sequence[str], ranks: int, **options: Any) -> Iterator[Trainer]:
    """``options``: those of the sender."""
    one = Trainer([urls] if isinstance(urls, str) else urls, ranks, options)
    try:
        yield one
    finally:
        one.close()
