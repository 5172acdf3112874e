"""The backend ``glass`` of ``torch.distributed``: NCCL's rules, and gloo underneath.

``csrc/communicator.cpp`` has the rules. Environment:

GLASS_COLLECTIVES   number of collectives that have a place on a device at once (4)
GLASS_WATCHDOG_S    time after which a waiting collective fails its device, and names what it and
                    the device's other collectives wait for (0: never)

A card's place is its SMs: NCCL holds 8 to 32 CTAs for each collective. With one place, two
communicators whose collectives are launched in two orders by two ranks wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

# ProcessGroupNCCL's setting: "2" ends a failed communicator and not the process
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CONTAINED = "2"

Connect = Callable[[str, int, int], tuple[Any, Any]]


def register() -> None:
    """Make the backend known to ``torch.distributed``, as the one of the device ``glass``."""
    if not hasattr(dist.Backend, "GLASS"):
        dist.Backend.register_backend("glass", _make, extended_api=True, devices=["glass"])


def _make(options: Any, backend_options: Any) -> Any:
    """Return a group's communicator. ``backend_options`` are NCCL's, and have no meaning here."""
    return make(options.store, options.group_rank, options.group_size, options.timeout)


def make(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a communicator without a group; several may be in one process, one for each device."""
    from harness.glass.device import _core

    return _core.make_communicator(
        rank,
        size,
        timeout,
        os.environ.get(_HANDLING) == _CONTAINED,
        _connecting(store, timeout),
    )


def collectives() -> list[str]:
    """Return what this process' devices have reached and not ended, and what each waits for."""
    from harness.glass.device import _core

    return list(_core.collectives())


def _connecting(store: Store, timeout: timedelta) -> Connect:
    def connect(name: str, rank: int, size: int) -> tuple[Any, Any]:
        control, data = (
            dist.ProcessGroupGloo(PrefixStore(f"{name}/{use}", store), rank, size, timeout)
            for use in ("control", "data")
        )
        return control, data

    return connect
