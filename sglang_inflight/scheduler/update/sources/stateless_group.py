"""Forms a group with a trainer of vLLM's, without ``torch.distributed`` on the trainer's side.

The trainer of ``vllm.distributed.weight_transfer`` keeps a ``TCPStore``. Every rank of the group
counts itself there, and the trainer leaves NCCL's id there (``StatelessProcessGroup``). The trainer
then forms NCCL's communicator by this id, sums one number over all ranks, and broadcasts
(``PyNcclCommunicator``; read in vLLM 0.32.0).
"""

from __future__ import annotations

import datetime
import os
import time
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.utils.network import NetworkAddress
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from sglang_inflight.scheduler.update.sources.process_group import (
    Formed,
    construct,
    is_nccl,
    last_for_ever,
    launches,
)
from sglang_inflight.scheduler.update.sources.unpickling import Function, Unpickler
from sglang_inflight.vocabulary.errors import Refused, describe

# size of an id of ncclGetUniqueId
_ID_BYTES = 128
# many times the length of a pickled id
_LONGEST_ID = 2048


def read_unique_id(content: bytes) -> bytes:
    """Return the id in a pickled ``ncclUniqueId``, a structure of ``ctypes``.

    Anybody on the network may have written ``content``, and unpickling would run it. So no object
    is made and no named module is imported (``Unpickler``). Raise ``Refused`` for anything else.

    The structure's module is vLLM's or a trainer's copy, and is not checked.
    """
    if len(content) > _LONGEST_ID:
        raise _refusal(f"it has {len(content)} bytes")
    try:
        found = _Reader(BytesIO(content)).load()
    except Exception as error:
        raise _refusal(describe(error)) from error
    match found:
        case _Structure(bytes(unique_id)):
            if len(unique_id) != _ID_BYTES:
                raise _refusal(f"the id has {len(unique_id)} bytes, not {_ID_BYTES}")
            return unique_id
    raise _refusal("it is another object")


class _Structure(NamedTuple):
    content: bytes


class _Reader(Unpickler):
    """Reads a structure as its bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return Function(lambda _, state: _Structure(state[1]))
        if name == "ncclUniqueId":
            return None
        raise ValueError("it is another object")


def _refusal(reason: str) -> Refused:
    return Refused(f"the trainer's NCCL id is no pickled ncclUniqueId: {reason}")


# key of the first object broadcast by rank 0
UNIQUE_ID = "broadcast_from/0/0"

POLL_S = 0.005
# a setting of torch's: above this number of ranks it uses several NCCL ids
_RANKS_PER_ROOT = "TORCH_NCCL_RANKS_PER_ROOT"


class StatelessRendezvous:
    """One trainer's store and its content.

    Use it on a rendezvous' thread: each method waits for the trainer.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, timeout: datetime.timedelta
    ) -> None:
        """Connect, and count this rank. The trainer goes on when all ranks have come."""
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._prefix = NetworkAddress(host, port).to_tcp()
        self._store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)

    def read_unique_id(self) -> bytes:
        """Return NCCL's id, left by the trainer when all ranks have come.

        Raise ``Refused`` if the trainer left something else.
        """
        return read_unique_id(self._store.get(UNIQUE_ID))

    def form(self, backend: str, name: str, unique_id: bytes, device: torch.device) -> Formed:
        """Return NCCL's group of ``unique_id``, or gloo's over the same store without a device.

        Torch looks up a communicator's id in a store. It is given a store with the trainer's id.
        So timeouts and the order of streams are the same as in every other group.
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
        if launches(backend):
            try:
                _sum_with_all(group, device)
            except Exception:
                # frees the group's name in torch for the next attempt
                _abort_process_group(group)
                raise
            last_for_ever(group)
        return Formed(group, self._store)


def _store_with(unique_id: bytes, name: str, timeout: datetime.timedelta) -> Store:
    """Return a store with the id of a group's first communicator, under torch's key."""
    store = HashStore()
    store.set_timeout(timeout)
    of_the_group: Store = store
    # torch prefixes a group's keys with its name, and a backend's with its device
    for prefix in (f"{name}/", "cuda/"):
        of_the_group = PrefixStore(prefix, of_the_group)
    # "0" is the group's first communicator; torch's stub allows only text
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
    """Do the first all-reduce of vLLM's communicators. All ranks wait here for all others.

    It runs on a stream of its own and no other stream waits for it, so no forward waits for a
    missing rank. NCCL's watchdog ends it after the group's time limit.
    """
    torch.get_device_module(device).set_device(device)
    with torch.get_device_module(device).Stream(device):
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(POLL_S)
    if (failure := work.exception()) is not None:
        raise RuntimeError(f"{failure}")
