"""Host memory available to a rank, and the refusal of larger copies."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_inflight.host_memory import available, available_to_this_rank
from sglang_inflight.scheduler.update import copies
from sglang_inflight.scheduler.update.copies import FileCopy, HostCopy
from sglang_inflight.vocabulary.errors import Conflict

GB = 1 << 30
MACHINE = 100 * GB
ONE_RANK = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "attn_dp_enabled": False}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=MACHINE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def available_in(tmp_path: Path, own: str) -> int:
    (tmp_path / "own").write_text(own)
    return available(tmp_path / "groups", tmp_path / "own")


def limited(group: Path, limit: int | str, used: int, files: int = 0) -> None:
    stat = f"anon 7\ninactive_file {files}"
    write(group, memory__max=f"{limit}", memory__current=f"{used}", memory__stat=stat)


def test_available_memory_respects_container_limit(tmp_path: Path) -> None:
    """A cgroup counts pages of files as used, and the kernel can drop such pages."""
    limited(tmp_path / "groups", 32 * GB, 30 * GB, files=4 * GB)
    assert available_in(tmp_path, "0::/\n") == 6 * GB


def test_tightest_parent_cgroup_limits_memory(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    limited(groups / "pod" / "container", "max", 3 * GB)
    limited(groups / "pod", 20 * GB, 8 * GB)
    limited(groups, 90 * GB, 10 * GB)
    assert available_in(tmp_path, "0::/pod/container\n") == 12 * GB


def test_cgroup_v1_limit_is_read(tmp_path: Path) -> None:
    own = tmp_path / "groups" / "memory" / "docker" / "abc"
    write(
        own,
        memory__limit_in_bytes=f"{16 * GB}",
        memory__usage_in_bytes=f"{10 * GB}",
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GB}",
    )
    write(
        own.parent.parent,
        memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes=f"{50 * GB}",
        memory__stat="total_inactive_file 0",
    )
    assert available_in(tmp_path, "9:cpu,memory:/docker/abc\n8:pids:/\n0::/\n") == 7 * GB


@pytest.mark.parametrize(
    "own", ["0::/\n", "4:memory:/a/path/of/the/host\n", "1:cpu:/\n", ""], ids=repr
)
def test_unlimited_cgroup_uses_machine_memory(tmp_path: Path, own: str) -> None:
    assert available_in(tmp_path, own) == MACHINE


def test_cgroup_over_limit_has_no_memory(tmp_path: Path) -> None:
    limited(tmp_path / "groups", 8 * GB, 9 * GB)
    assert available_in(tmp_path, "0::/\n") == 0


def test_real_cgroup_can_be_read() -> None:
    assert 0 < available() <= MACHINE


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 8}, 8),
        ({"tp_size": 2, "pp_size": 4}, 8),
        ({"tp_size": 4, "dp_size": 2}, 8),
        # attention DP adds no ranks
        ({"tp_size": 4, "dp_size": 4, "attn_dp_enabled": True}, 4),
        ({"tp_size": 8, "nnodes": 2}, 4),
    ],
    ids=str,
)
def test_host_memory_is_divided_by_ranks_of_one_node(sizes: dict[str, int], ranks: int) -> None:
    with get_parallel().override(**(ONE_RANK | sizes)):
        assert available_to_this_rank() == pytest.approx(available() / ranks, rel=0.1)


def never() -> None:
    raise AssertionError("a copy was begun")


def test_pinned_copy_beyond_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "available_to_this_rank", lambda: 7 * GB)
    # torch pins a power of two: 8 GiB
    weights = torch.empty(5 * GB, dtype=torch.uint8, device="meta")
    with pytest.raises(Conflict, match="8192 MiB of the host's memory, and 7168 MiB are free"):
        HostCopy([weights], never)


def test_file_copy_beyond_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(Conflict, match=r"TMPDIR.*discard"):
        FileCopy([torch.zeros(1001, dtype=torch.uint8)], never)
