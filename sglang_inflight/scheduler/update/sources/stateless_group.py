"""Meeting a trainer as vLLM's workers do, without ``torch.distributed`` on its side.

The trainer of ``vllm.distributed.weight_transfer`` keeps a ``TCPStore`` in which every rank of
the group counts itself, and leaves NCCL's id there (``StatelessProcessGroup``). It then forms
NCCL's communicator by that id, sums one number over all ranks, and broadcasts
(``PyNcclCommunicator``; read in vLLM 0.32.0).
"""

from __future__ import annotations

import datetime
import os
import time

import torch
import torch.distributed as dist
from sglang.srt.utils.network import NetworkAddress
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.update.sources.process_group import (
    Formed,
    construct,
    is_nccl,
    last_for_ever,
)
from sglang_inflight.scheduler.update.sources.unique_id import read_unique_id

# the first object that rank 0 leaves for all others
UNIQUE_ID = "broadcast_from/0/0"

POLL_S = 0.005
# torch's own, of what is said in the environment: with more ranks it wants several ids
_RANKS_PER_ROOT = "TORCH_NCCL_RANKS_PER_ROOT"


class StatelessRendezvous:
    """One trainer's store, and what it left in it.

    For the thread of a rendezvous: each method waits for the trainer.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, timeout: datetime.timedelta
    ) -> None:
        """Connects, and counts this rank. The trainer goes on when all have come."""
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._prefix = NetworkAddress(host, port).to_tcp()
        self._store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)

    def read_unique_id(self) -> bytes:
        """NCCL's id, which the trainer leaves when all ranks have come. Raises ``Refused``
        where it left something else."""
        return read_unique_id(self._store.get(UNIQUE_ID))

    def form(self, backend: str, name: str, unique_id: bytes, device: torch.device) -> Formed:
        """NCCL's group of that id; or gloo's over the same store, where there is no device.

        Torch asks its store for the id of a communicator that rank 0 made. It is given one
        that has the trainer's: so what ends a broadcast that does not come, and which stream
        waits for which, is the same as in every other group.
        """
        store: Store
        if is_nccl(backend):
            _require_one_root(self._world_size)
            store = _store_with(unique_id, name, self._timeout)
        else:
            store = PrefixStore(self._prefix, self._store)
        group = construct(
            backend,
            store,
            name=name,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        if is_nccl(backend):
            try:
                _sum_with_all(group, device)
            except Exception:
                # torch knows it by its name, which the next one has, too
                _abort_process_group(group)
                raise
            last_for_ever(group)
        return Formed(group, self._store)


def _store_with(unique_id: bytes, name: str, timeout: datetime.timedelta) -> Store:
    """One in which torch finds the id of a group's first communicator."""
    store = HashStore()
    store.set_timeout(timeout)
    of_the_group: Store = store
    # as torch puts a group's keys under its name, and a backend's under that of its device
    for prefix in (f"{name}/", "cuda/"):
        of_the_group = PrefixStore(prefix, of_the_group)
    # torch counts the communicators of a group; its stub knows of text alone
    of_the_group.set("0", unique_id)  # type: ignore[arg-type]
    return store


def _require_one_root(world_size: int) -> None:
    most = int(os.environ.get(_RANKS_PER_ROOT, "128"))
    if world_size > most:
        raise Refused(
            f"world_size is {world_size}, and there is one NCCL id: start the server with "
            f"{_RANKS_PER_ROOT}={world_size} or more in its environment"
        )


def _sum_with_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """As vLLM's communicators begin. All ranks wait here for all others.

    On a stream of its own and not waited for by any other, so that no forward waits for a
    rank that does not come. Past the group's time limit NCCL's watchdog ends it.
    """
    torch.get_device_module(device).set_device(device)
    with torch.get_device_module(device).Stream(device):
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(POLL_S)
    if (failure := work.exception()) is not None:
        raise RuntimeError(f"{failure}")
