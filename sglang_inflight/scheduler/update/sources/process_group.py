"""Meeting a trainer in a process group that cannot take this server with it."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# longer than any update, and short enough for a count of milliseconds
NEVER = datetime.timedelta(days=365)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# end the communicator, and not the process
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


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
    with _errors_cost_the_group_only():
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


@contextmanager
def _errors_cost_the_group_only() -> Iterator[None]:
    """For groups that are made within: torch reads the variable when it makes one.

    The rendezvous is over by then, so that the lock is not held for long.
    """
    with _environment:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = before
