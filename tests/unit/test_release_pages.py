"""Pages of shared memory are unmapped after reading, and no tensor loses its contents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_inflight.scheduler.update.sources import tensors as sources
from sglang_inflight.scheduler.update.sources.tensors import release_pages

ROWS = 4096
SHARED = "/torch_"
Named = list[tuple[str, torch.Tensor]]


def tensors() -> Named:
    return [(f"w{i}", torch.full((ROWS, 256), float(i))) for i in range(4)]


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Leave out the shared memory that earlier tests of this process have not given back yet."""
    _before.update(_shared_files())
    yield
    _before.clear()


_before: set[str] = set()


def _shared_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {_file_of(line) for line in lines if SHARED in line} - _before


def _file_of(line: str) -> str:
    return line.split()[5]


def mapped_kib(of: str) -> int:
    """Return the resident memory of mapped files in KiB, from this process's page table."""
    smaps = Path("/proc/self/smaps").read_text()
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps)
    heads = {mapping.splitlines()[0]: mapping for mapping in mappings}
    found = [m for head, m in heads.items() if of in head and _file_of(head) not in _before]
    assert found
    return sum(int(kib) for m in found for kib in re.findall(r"^Rss: +(\d+) kB", m, re.M))


def shared() -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors():
        yield name, tensor.share_memory_()


def of_one_storage() -> Iterator[tuple[str, torch.Tensor]]:
    whole = torch.cat([tensor for _, tensor in tensors()])
    for i in range(4):
        yield f"w{i}", whole[i * ROWS : (i + 1) * ROWS]


def one_shared_bucket() -> Iterator[tuple[str, torch.Tensor]]:
    """Share many tensors in one bucket, like a sender."""
    whole = torch.cat([tensor for _, tensor in tensors()]).share_memory_()
    for i in range(4):
        yield f"w{i}", whole[i * ROWS : (i + 1) * ROWS]


def test_read_bucket_is_unmapped() -> None:
    most = 0
    for name, tensor in release_pages(one_shared_bucket()):
        assert torch.equal(tensor, dict(tensors())[name])
        most = max(most, mapped_kib(SHARED))
        last = tensor
    one = last.nbytes // 1024
    # the whole bucket when it was written, and at most a quarter less each time
    assert most >= 3 * one
    assert mapped_kib(SHARED) < one // 4


def small_in_one_bucket() -> Iterator[tuple[str, torch.Tensor]]:
    """Share tensors smaller than a page, with gaps, and others of another storage in between."""
    whole = torch.cat([tensor for _, tensor in tensors()]).share_memory_().view(-1)
    for at, part in enumerate(whole.split(768)):
        yield f"s{at}", part[: 768 - at % 2]
        if at == 100:
            yield "another", torch.ones(3)


def test_small_neighbours_are_unmapped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    unmap = sources._madvise

    def count(start: int, size: int, advice: int) -> None:
        calls.append(size)
        unmap(start, size, advice)

    monkeypatch.setattr(sources, "_madvise", count)
    kept = dict(release_pages(small_in_one_bucket()))
    assert mapped_kib(SHARED) < 64
    whole = sum(tensor.nbytes for _, tensor in tensors())
    assert whole <= sum(calls) < 1.01 * whole
    assert len(calls) < len(kept) / 100
    for name, tensor in small_in_one_bucket():
        assert torch.equal(kept[name], tensor)


def test_large_read_tensor_is_not_held() -> None:
    each = ((str(i), torch.ones(ROWS, 256).share_memory_()) for i in range(3))
    for _ in release_pages(each):
        assert len(_shared_files()) == 1


@pytest.mark.parametrize("kind", ["shared memory", "a bucket", "one storage", "own storage"])
def test_kept_tensors_keep_values_after_unmapping(kind: str) -> None:
    weights = {
        "shared memory": shared(),
        "a bucket": one_shared_bucket(),
        "one storage": of_one_storage(),
        "own storage": iter(tensors()),
    }[kind]
    kept = dict(release_pages(weights))
    for name, tensor in tensors():
        assert torch.equal(kept[name], tensor)


def test_expanded_tensor_unmaps_only_its_memory() -> None:
    """An expanded tensor's nominal bytes reach into another tensor's memory."""
    whole = torch.ones(ROWS, 1024).share_memory_()
    behind = torch.randn(ROWS, 1024)
    before = behind.clone()
    list(release_pages([("wide", whole[:1].expand(ROWS * 4, 1024)), ("none", torch.zeros(0))]))
    assert torch.equal(behind, before)
    assert torch.equal(whole, torch.ones(ROWS, 1024))
