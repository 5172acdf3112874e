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
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.utils.network import NetworkAddress
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from sglang_inflight.scheduler.groups.process_group import (
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


def form_stateless_group(
    backend: str,
    host: str,
    port: int,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    device: torch.device,
    on_id: Callable[[], None],
) -> Formed:
    """Form NCCL's group of the trainer's id, or gloo's over the same store without a device.

    Call it on a rendezvous' thread: it waits for the trainer, and for all ranks. ``on_id`` is
    called when the trainer's id is there. Raise ``Refused`` if the trainer left something else.

    Torch looks up a communicator's id in a store. It is given a store with the trainer's id.
    So timeouts and the order of streams are the same as in every other group.
    """
    # counts this rank: the trainer goes on when all ranks have come
    trainers = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    unique_id = read_unique_id(trainers.get(UNIQUE_ID))
    on_id()
    store: Store
    if is_nccl(backend):
        _require_one_root(world_size)
        store = _store_with(unique_id, name, timeout)
    else:
        store = PrefixStore(NetworkAddress(host, port).to_tcp(), trainers)
    group = construct(backend, store, name=name, rank=rank, world_size=world_size, timeout=timeout)
    if launches(backend):
        try:
            _sum_with_all(group, device)
        except Exception:
            # frees the group's name in torch for the next attempt
            _abort_process_group(group)
            raise
        last_for_ever(group)
    return Formed(group, trainers)


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
