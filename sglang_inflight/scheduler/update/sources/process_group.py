"""Meeting a trainer in a process group that cannot take this server with it."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only


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
) -> dist.ProcessGroup:
    """As SGLang and its trainers form it. ``timeout`` is that of the rendezvous.

    A watchdog of NCCL's ends a process in which a broadcast failed or took longer than its
    group's timeout. Here that is the trainer's failure: it may cost its update, and not the
    requests. So the group gets a watchdog that ends the communicator only, and so much time
    that its watchdog never ends a broadcast: whoever waits for one sets the limit.
    """
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    with errors_cost_the_group_only():
        group = init_custom_process_group(
            backend=backend,
            store=PrefixStore(name, store),
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            group_name=name,
        )
    if is_nccl(backend):
        dist.set_timeout(NEVER, group)
    return group
