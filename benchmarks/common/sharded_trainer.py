"""A trainer of several ranks, sharded by rows, each rank behind a link of its own.

Rank 0 has the clients of the servers. The versions that it sends are checkpoints, read by every
rank at the start: a rank keeps its rows of each tensor alone, as FSDP2's ranks do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.common.links import INTERFACE, Link
from benchmarks.common.models import WEIGHTS
from sglang_inflight.client import Fleet, Sender, ShardSender

# parts by chains of servers, parts from the trainer to each server, and whole tensors
Way = Literal["relays", "direct", "broadcast"]

PATIENCE_S = 300.0
# each rank is alone in its network, so the port is free
PORT = 29500


@dataclass(frozen=True)
class Sent:
    seconds: float
    # digest of the first rank's weights after the commit, by the server's URL
    digests: Mapping[str, str]


class ShardedTrainer:
    """The benchmark's side of the trainer. Each order goes to all ranks."""

    def __init__(
        self, connections: Sequence[Connection], processes: Sequence[SpawnProcess]
    ) -> None:
        self._connections = connections
        self._processes = processes

    def join(self, urls: Sequence[str]) -> None:
        """Join these servers, in place of those before, with a group for each way."""
        self._order("join", urls)

    def send(self, way: Way, checkpoint: int, name: str) -> Sent:
        """Send the checkpoint of this number as the version ``name``."""
        found = self._order("send", way, checkpoint, name)
        assert isinstance(found, Sent)
        return found

    def carry(self, nbytes: int) -> float:
        """Send ``nbytes`` from rank 0 to rank 1 in one piece, and return the seconds."""
        seconds: float = self._order("carry", nbytes)
        return seconds

    def _order(self, call: str, *arguments: object) -> Any:
        """Return what rank 0 answers."""
        for connection in self._connections:
            connection.send((call, arguments))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(PATIENCE_S):
                raise TimeoutError(f"rank {rank} of the trainer has not answered {call!r}")
            answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers[0]


@contextlib.contextmanager
def sharded_trainer(links: Sequence[Link], checkpoints: Sequence[Path]) -> Iterator[ShardedTrainer]:
    """Start a trainer with a rank behind each link."""
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for rank, link in enumerate(links):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, len(links), links[0].address, checkpoints)
            process = context.Process(target=_run, args=arguments, daemon=True)
            with link.inside():
                process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield ShardedTrainer(connections, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---- a rank's process ---------------------------------------------------------------


def _run(
    orders: Connection, rank: int, ranks: int, first: str, checkpoints: Sequence[Path]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    patience = timedelta(seconds=PATIENCE_S)
    store = TCPStore(first, PORT, ranks, is_master=rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    one = _Rank(rank, [_rows_of(checkpoint, ranks) for checkpoint in checkpoints])
    while True:
        try:
            call, arguments = orders.recv()
            orders.send(getattr(one, call)(*arguments))
        except EOFError:
            return
        except Exception as error:
            orders.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _rows_of(checkpoint: Path, ranks: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in load_file(checkpoint / WEIGHTS).items()
    }


class _Rank:
    def __init__(self, rank: int, checkpoints: Sequence[dict[str, DTensor]]) -> None:
        self._rank = rank
        self._checkpoints = checkpoints
        self._senders: dict[Way, Any] = {}
        self._fleet: Fleet | None = None

    def join(self, urls: Sequence[str]) -> None:
        for sender in self._senders.values():
            sender.leave()
        if self._fleet is not None:
            self._fleet.close()
        # a fleet even for one server: the calls are the same for each number
        self._fleet = Fleet(urls) if self._rank == 0 else None
        self._senders = {
            "relays": ShardSender(self._fleet, group_name="parts_relays"),
            "direct": ShardSender(self._fleet, group_name="parts_direct", relays=False),
        }
        if self._fleet is not None:
            self._senders["broadcast"] = Sender(self._fleet, group_name="parts_broadcast")
        for sender in self._senders.values():
            sender.join()

    def send(self, way: Way, checkpoint: int, name: str) -> Sent | None:
        tensors = self._checkpoints[checkpoint]
        # rank 0 alone broadcasts
        sender: Any = self._senders.get(way)
        dist.barrier()
        began = time.perf_counter()
        if way != "broadcast":
            report = sender.send(tensors.items(), weight_version=name)
        else:
            whole = ((each, tensor.full_tensor()) for each, tensor in tensors.items())
            if sender is None:
                # gathering takes every rank
                for _ in whole:
                    pass
                return None
            report = sender.send(whole, weight_version=name)
        seconds = time.perf_counter() - began
        if report is None:
            return None
        answers = report.answers.items()
        return Sent(seconds, {url: answer["ranks"][0]["digest"] for url, answer in answers})

    def carry(self, nbytes: int) -> float:
        row = torch.zeros(nbytes, dtype=torch.uint8)
        dist.barrier()
        began = time.perf_counter()
        if self._rank == 0:
            dist.send(row, 1)
        elif self._rank == 1:
            dist.recv(row, 0)
        dist.barrier()
        return time.perf_counter() - began
