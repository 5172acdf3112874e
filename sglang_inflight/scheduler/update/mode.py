"""Chooses the memory for staging: the device's, the host's, or none."""

from __future__ import annotations

import enum
import logging

import torch

from sglang_inflight.scheduler.collectives import min_over_ranks
from sglang_inflight.scheduler.memory.host import available_to_this_rank

logger = logging.getLogger(__name__)

# Memory that must stay free beside the shadow, as a share of the shadow.
MARGIN = 0.05


class StagingMode(enum.IntEnum):
    """Ordered from worst to best. Ranks that compute together take the worst mode of all."""

    OFF = 0
    HOST = 1
    DEVICE = 2


def choose_mode(
    wanted: str,
    nbytes: int,
    device: torch.device,
    room: int | None = None,
    pinned: int | None = None,
    *,
    share_of_room: float = 1.0,
    why_not: str | None = None,
) -> StagingMode:
    """Return the mode set, or under ``auto`` the best with enough memory. Log the reason.

    ``nbytes`` is the size of this rank's weights. ``room`` is the KV cache's memory on ``device``,
    if the cache takes all that is left. ``pinned`` is the weights' size in the host's memory
    (``pinned_bytes``), if larger. ``share_of_room`` is the share of ``room`` free for staging under
    ``auto``. ``why_not`` is why the weights cannot be staged, or None.
    """
    if wanted != "auto":
        mode, reason = StagingMode[wanted.upper()], "as set"
    elif why_not is not None:
        mode, reason = StagingMode.OFF, why_not
    else:
        mode, reason = _best(nbytes, device, room, pinned or nbytes, share_of_room)
    mode = StagingMode(min_over_ranks(mode))
    logger.info("Weight staging: %s (%s).", mode.name.lower(), reason)
    return mode


def _best(
    nbytes: int, device: torch.device, room: int | None, pinned: int, share_of_room: float
) -> tuple[StagingMode, str]:
    needed = int(nbytes * (1 + MARGIN))
    host_share = available_to_this_rank()
    reason = f"{needed >> 20} MiB needed"
    if room is not None:
        reason += f", the KV cache would have {room >> 20} MiB on {device}"
        fits = needed <= room * share_of_room
        if not fits:
            reason += f", and staging may take {share_of_room:.0%} of that "
            reason += "(SGLANG_INFLIGHT_STAGING_KV_SHARE)"
    else:
        on_host = device.type == "cpu"
        free = host_share if on_host else torch.get_device_module(device).mem_get_info()[0]
        reason += f", {free >> 20} MiB free on {device}"
        fits = free >= needed
    if fits:
        return StagingMode.DEVICE, reason
    if device.type != "cpu":
        pinned = int(pinned * (1 + MARGIN))
        reason += f", {host_share >> 20} MiB of the host for this rank, {pinned >> 20} needed there"
        if host_share >= pinned:
            return StagingMode.HOST, reason
    return StagingMode.OFF, reason
