"""Where new weights wait for their commit."""

from __future__ import annotations

import enum
import logging

import psutil
import torch

from sglang_inflight.scheduler.agreement import smallest

logger = logging.getLogger(__name__)

# What must stay free beside the shadow, as a share of it.
MARGIN = 0.05


class StagingMode(enum.IntEnum):
    """The larger, the better. Ranks that compute together take the smallest among them."""

    OFF = 0
    HOST = 1
    DEVICE = 2


def choose_mode(wanted: str, nbytes: int, device: torch.device) -> StagingMode:
    """The mode asked for, or under ``auto`` the best for which there is memory.

    ``nbytes`` is the size of this rank's weights. Logs the choice and its reason.
    """
    if wanted != "auto":
        mode, reason = StagingMode[wanted.upper()], "as set"
    else:
        mode, reason = _best(nbytes, device)
    mode = StagingMode(smallest(mode))
    logger.info("Weight staging: %s (%s).", mode.name.lower(), reason)
    return mode


def _best(nbytes: int, device: torch.device) -> tuple[StagingMode, str]:
    needed = int(nbytes * (1 + MARGIN))
    host_free = psutil.virtual_memory().available
    free = host_free if device.type == "cpu" else torch.get_device_module(device).mem_get_info()[0]
    reason = f"{needed >> 20} MiB needed, {free >> 20} MiB free on {device}"
    if free >= needed:
        return StagingMode.DEVICE, reason
    if device.type != "cpu":
        reason += f", {host_free >> 20} MiB free on the host"
        if host_free >= needed:
            return StagingMode.HOST, reason
    return StagingMode.OFF, reason
