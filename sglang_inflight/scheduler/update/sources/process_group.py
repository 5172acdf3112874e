"""Meeting a trainer in a process group that cannot take this server with it."""

from __future__ import annotations

import datetime
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from torch._C._distributed_c10d import PrefixStore, Store, _unregister_process_group
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import rendezvous

from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only

# What a broadcast that waits for its trainer takes of a device. NCCL would take 8 to 32, and a
# forward's kernels that need the whole device at once would wait for the trainer: their own
# all-reduce with them, on a rank whose broadcast may wait for that one. NCCL takes the fewest that
# any rank of a group asks for.
#
# NCCL_LAUNCH_ORDER_IMPLICIT is the user's to set: each collective of a forward would pay for it,
# and NCCL takes launches from two threads for an error then.
MAX_CTAS = 2


class Formed(NamedTuple):
    """A group, and the store in which it was formed: the trainer keeps it, and it ends with
    the trainer."""

    group: dist.ProcessGroup
    store: Store


def is_nccl(backend: str) -> bool:
    """Also of a group that has one backend for each kind of device."""
    return "nccl" in backend


def form_group(
    backend: str,
    init_method: str,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
) -> Formed:
    """As SGLang and its trainers form it. ``timeout`` is that of the rendezvous."""
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group = construct(
        backend,
        PrefixStore(name, store),
        name=name,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if is_nccl(backend):
        last_for_ever(group)
    return Formed(group, store)


def construct(
    backend: str,
    store: Store,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
) -> dist.ProcessGroup:
    """A watchdog of NCCL's ends a process in which a broadcast failed or took longer than its
    group's timeout. Here that is the trainer's failure: it may cost its update, and not the
    requests. So the group gets a watchdog that ends the communicator only.

    Any other backend has none, and waits here for its peers: there may be many at once.
    """
    with errors_cost_the_group_only() if is_nccl(backend) else nullcontext():
        return init_custom_process_group(
            backend=backend,
            store=store,
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            group_name=name,
            pg_options=_nccl_options(timeout) if backend == "nccl" else None,
        )


def _nccl_options(timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # torch warns where it differs from the group's
    options._timeout = timeout
    options.config.max_ctas = MAX_CTAS
    return options


def last_for_ever(group: dist.ProcessGroup) -> None:
    """So that NCCL's watchdog never ends a broadcast: whoever waits for one sets the limit."""
    dist.set_timeout(NEVER, group)


def free_name(group: dist.ProcessGroup) -> None:
    """So that another may have it, though ``group`` itself can be neither destroyed nor ended."""
    _world.pg_map.pop(group, None)
    name = _world.pg_names.pop(group, None)
    if name is not None:
        _unregister_process_group(name)
