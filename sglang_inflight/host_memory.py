"""Host memory still available to a rank, within the machine and its containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.topology import count_replicas

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class _Version(NamedTuple):
    """File and field names of one version of Linux control groups."""

    limit: str
    usage: str
    # file pages: the kernel reclaims them before it kills a process
    reclaimable: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def available_to_this_rank() -> int:
    """Return this rank's share, in bytes: every rank of the host needs as much."""
    return available() // _ranks_on_this_host()


def available(cgroups: Path = _CGROUPS, own_groups: Path = _OWN_GROUPS) -> int:
    """Return the available bytes of the machine, or of this process's control groups if fewer.

    The kernel kills a process above its group's limit, even when the machine has free memory.
    """
    free: int = psutil.virtual_memory().available
    return max(0, min([free, *_left_by_groups(cgroups, own_groups)]))


def pinned_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a pinned copy of ``tensor``: torch rounds up to a power of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes else 0


def _ranks_on_this_host() -> int:
    """Return the number of ranks per node, the same on all nodes."""
    parallel = get_parallel()
    ranks: int = parallel.tp_size * parallel.pp_size * count_replicas()
    return max(1, ranks // parallel.nnodes)


def _left_by_groups(cgroups: Path, own_groups: Path) -> Iterator[int]:
    """Yield the bytes left by each cgroup of this process, from its own up to the mount's root."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, version = cgroups / "memory", _V1
        else:
            continue
        group = root / path.lstrip("/")
        # a container sees its own group as the root, but may see the host's path
        for each in (group, *group.parents):
            if each.is_relative_to(root) and (left := _left_by(each, version)) is not None:
                yield left


def _left_by(group: Path, version: _Version) -> int | None:
    """Return the bytes left by ``group``, or None if it is not visible or has no limit."""
    try:
        limit = (group / version.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((group / version.usage).read_text())
        said = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - used + int(said.get(version.reclaimable, 0))
