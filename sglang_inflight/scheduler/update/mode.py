"""Chooses the form of staging: changes, a second copy on the device or the host, or none."""

from __future__ import annotations

import enum
import logging

import torch

from sglang_inflight.host_memory import available_to_this_rank
from sglang_inflight.scheduler.collectives import min_over_ranks

logger = logging.getLogger(__name__)

# Memory that must stay free beside the shadow, as a share of the shadow.
MARGIN = 0.05


class StagingMode(enum.IntEnum):
    """Ordered from worst to best. Ranks that compute together take the worst mode of all."""

    OFF = 0
    HOST = 1
    CHANGES = 2
    DEVICE = 3


def choose_mode(
    wanted: str, nbytes: int, device: torch.device, *, why_not: str | None = None
) -> StagingMode:
    """Return the mode set, or under ``auto`` the best with enough memory. Log the reason.

    ``nbytes`` is the size of this rank's weights. ``why_not`` is why the weights cannot be staged,
    or None.
    """
    if wanted != "auto":
        mode, reason = StagingMode[wanted.upper()], "as set"
    elif why_not is not None:
        mode, reason = StagingMode.OFF, why_not
    else:
        mode, reason = _best(nbytes, device)
    mode = StagingMode(min_over_ranks(mode))
    logger.info("Weight staging: %s (%s).", mode.name.lower(), reason)
    return mode


def _best(nbytes: int, device: torch.device) -> tuple[StagingMode, str]:
    if device.type != "cpu":
        return StagingMode.CHANGES, "a second copy of the weights would take the KV cache's memory"
    needed, free = int(nbytes * (1 + MARGIN)), available_to_this_rank()
    reason = f"{needed >> 20} MiB needed for a second copy, {free >> 20} MiB free for this rank"
    # a commit of whole copies exchanges pointers on a CPU, and no elements
    return StagingMode.DEVICE if free >= needed else StagingMode.CHANGES, reason
