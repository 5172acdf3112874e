"""Forms process groups with trainers; a failing group cannot end this server."""

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

# CTAs of the device held by a broadcast while it waits for its trainer. NCCL would hold 8 to 32.
# Then a forward's kernels needing the whole device at once would wait for the trainer. So would the
# forward's all-reduce on another rank, whose broadcast may wait behind it. NCCL uses the smallest
# number asked for by any rank of the group.
#
# NCCL_LAUNCH_ORDER_IMPLICIT is left to the user: it would slow down each collective of a forward,
# and NCCL would then treat launches from two threads as an error.
MAX_CTAS = 2


class Formed(NamedTuple):
    """A group, and the trainer's store for its rendezvous. The store ends with the trainer."""

    group: dist.ProcessGroup
    store: Store


def is_nccl(backend: str) -> bool:
    """Return whether NCCL is the backend, or one of several for kinds of devices."""
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
    """Form a group like SGLang and its trainers. ``timeout`` limits the rendezvous."""
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
    """Construct a group with a watchdog that aborts the communicator only.

    NCCL's own watchdog ends the process after a failed broadcast, or one beyond the group's
    timeout. Here the trainer has failed: that may cost its update, but not the requests.

    Other backends have no watchdog, and wait here for their peers: there may be many at once.
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
    # torch warns about a timeout other than the group's
    options._timeout = timeout
    options.config.max_ctas = MAX_CTAS
    return options


def last_for_ever(group: dist.ProcessGroup) -> None:
    """Set no timeout for NCCL's watchdog: the waiting thread limits a broadcast itself."""
    dist.set_timeout(NEVER, group)


def free_name(group: dist.ProcessGroup) -> None:
    """Free the name of ``group`` for another group, without destroying or aborting ``group``."""
    _world.pg_map.pop(group, None)
    name = _world.pg_names.pop(group, None)
    if name is not None:
        _unregister_process_group(name)
