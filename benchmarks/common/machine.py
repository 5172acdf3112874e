"""The machine, the versions and the commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# the variable with the python of vLLM's environment
VLLM_PYTHON = "VLLM_PYTHON"
PACKAGES = ("sglang", "sglang-inflight", "torch", "transformers")


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores, the memory in GB, and the kernel."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(Path("/proc/cpuinfo")) or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(pages * page / 1e9, 1),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages, without those that are missing."""
    found = {name: version_of(name) for name in PACKAGES}
    known = {name: number for name, number in found.items() if number is not None}
    return {"python": platform.python_version(), **known}


def commit() -> str:
    """Return git's name for the working tree, with ``-dirty`` if files differ from it."""
    return output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"


def output(*command: str) -> str | None:
    """Return what ``command`` prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu(file: Path) -> str | None:
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None
