"""Tensors read from a checkpoint come from one unchanged checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources import checkpoint_files
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_pickled, read_safetensors
from sglang_inflight.scheduler.update.sources.regular_file import ReadBuffers
from sglang_inflight.scheduler.update.sources.safetensors_file import (
    Indexes,
    SafetensorsFile,
    Wanted,
)
from sglang_inflight.vocabulary.errors import Refused
from tests.support import resident as memory
from tests.support.open_files import open_files

Weights = dict[str, torch.Tensor]
PAIRS = Iterator[tuple[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the test's small files in as many pieces as large ones."""
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 4096)


def weights(start: int = 0) -> Weights:
    """Return small tensors, read together, and large tensors, read in pieces."""
    shapes = [(3,), (40, 40), (7, 5), (200, 30), (1,), (0, 4), (11,)]
    return {
        f"layer{start + i}": torch.randn(shape, dtype=torch.float32)
        for i, shape in enumerate(shapes)
    }


def reading(*paths: Path) -> PAIRS:
    kind = read_safetensors if paths[0].suffix == ".safetensors" else read_pickled
    with AbandonableThread(lambda: None) as thread:
        yield from kind([str(path) for path in paths], thread, UNPACED)


def same(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


def save_zipped(tensors: Weights, path: Path) -> None:
    torch.save(tensors, path)


def save_old_format(tensors: Weights, path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, tuple[str, Callable[[Weights, Path], None]]] = {
    "safetensors": ("model.safetensors", save_file),
    "bin": ("model.bin", save_zipped),
    "old bin": ("model.bin", save_old_format),
}
formats = pytest.mark.parametrize(("file", "save"), FORMATS.values(), ids=FORMATS)


@formats
def test_every_tensor_of_every_file_is_read(
    tmp_path: Path, file: str, save: Callable[[Weights, Path], None]
) -> None:
    parts = [weights(0), weights(10)]
    paths = [tmp_path / f"{i}-{file}" for i in range(2)]
    for part, path in zip(parts, paths, strict=True):
        save(part, path)
    assert same({name: tensor.clone() for name, tensor in reading(*paths)}, parts[0] | parts[1])


def test_tensors_that_nobody_wants_are_described_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [weights(), weights(7)]
    for at, tensors in enumerate(saved):
        save_file(tensors, tmp_path / f"{at}.safetensors")
    wanted = {"layer1", "layer4", "layer10"}
    asked = 0
    read_into = SafetensorsFile.read_into

    def count(file: SafetensorsFile, view: memoryview, start: int) -> int:
        nonlocal asked
        # none of its header
        asked += len(view) if "index" in vars(file) else 0
        return read_into(file, view, start)

    monkeypatch.setattr(SafetensorsFile, "read_into", count)
    everything = saved[0] | saved[1]
    with AbandonableThread(lambda: None) as thread:
        found = {
            name: tensor if tensor.is_meta else tensor.clone()
            for name, tensor in read_safetensors(
                [str(tmp_path / f"{at}.safetensors") for at in range(2)],
                thread,
                UNPACED,
                wants=Wanted(lambda place: place.name in wanted),
            )
        }
    assert found.keys() == everything.keys()
    assert asked == sum(everything[name].nbytes for name in wanted)
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (everything[name].shape, everything[name].dtype)
        assert tensor.is_meta == (name not in wanted)
        assert tensor.is_meta or torch.equal(tensor, everything[name])


@formats
def test_kept_tensors_keep_their_values(
    tmp_path: Path, file: str, save: Callable[[Weights, Path], None]
) -> None:
    save(weights(), tmp_path / file)
    assert same(dict(reading(tmp_path / file)), dict(reading(tmp_path / file)))
    expected = {name: tensor.clone() for name, tensor in reading(tmp_path / file)}
    assert same(dict(reading(tmp_path / file)), expected)


def rewrite(path: Path) -> None:
    """Rewrite a file in place at the same size, like a trainer's next step."""
    status = path.stat()
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(path.read_bytes())
    os.utime(draft, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    draft.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 100)


CHANGES = [rewrite, replace, cut, Path.unlink]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["in it", "before it", "behind it"])
@formats
def test_file_changed_during_read_is_refused(
    tmp_path: Path,
    file: str,
    save: Callable[[Weights, Path], None],
    when: str,
    change: Callable[[Path], None],
) -> None:
    paths = [tmp_path / f"{i}-{file}" for i in range(3)]
    for i, path in enumerate(paths):
        save(weights(10 * i), path)
    read = reading(*paths)
    # stop within the middle file
    for name, _ in read:
        if name == "layer11":
            break
    changed = paths[{"before it": 0, "in it": 1, "behind it": 2}[when]]
    change(changed)
    with pytest.raises(Refused, match=f"{changed.name} (changed|ends|cannot be)"):
        list(read)


@formats
def test_name_in_two_files_is_refused(
    tmp_path: Path, file: str, save: Callable[[Weights, Path], None]
) -> None:
    paths = [tmp_path / f"{i}-{file}" for i in range(2)]
    save({"a": torch.ones(2), "b": torch.ones(2)}, paths[0])
    save({"c": torch.ones(2), "b": torch.zeros(2)}, paths[1])
    with pytest.raises(Refused, match=f"'b' is in {paths[0].name} and in {paths[1].name}"):
        list(reading(*paths))


@pytest.mark.parametrize("links", [True, False], ids=["one file", "files without tensors"])
def test_headers_together_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """No more files are opened: 150 links to one large header would need all of the memory."""
    opened: list[str] = []

    class Opened(SafetensorsFile):
        def __init__(self, path: str, name: str, indexes: Indexes | None) -> None:
            opened.append(name)
            super().__init__(path, name, indexes)

    monkeypatch.setattr(checkpoint_files, "SafetensorsFile", Opened)
    monkeypatch.setattr(checkpoint_files, "_MOST_HEADERS_BYTES", 3000)
    first = tmp_path / "0.safetensors"
    names = b'"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}' if links else b""
    first.write_bytes((992).to_bytes(8, "little") + (b"{" + names + b"}").ljust(992))
    paths = [first, *(tmp_path / f"{i}.safetensors" for i in range(1, 9))]
    for path in paths[1:]:
        path.hardlink_to(first)
    with pytest.raises(Refused, match="is in 0" if links else "4000 bytes up to 3.safetensors"):
        list(reading(*paths))
    assert len(opened) == (2 if links else 4)
    list(reading(first))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\3\4" + bytes(100)])
def test_unreadable_bin_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"model\.bin cannot be read"):
        list(reading(path))
    torch.save([1, 2], path)
    with pytest.raises(Refused, match=r"model\.bin must hold tensors by name, not a list"):
        list(reading(path))


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    read = reading(path)
    next(read)
    read.close()  # type: ignore[attr-defined]
    list(reading(path))
    assert not open_files(str(path))


# ---- memory ------------------------------------------------------------------------------


def test_released_read_buffer_is_reused() -> None:
    buffers = ReadBuffers(1 << 20)
    places = set()
    held = None
    for _ in range(10):
        # a consumer of single tensors holds the last while the next is read
        taken = buffers.take(1000)
        places.add(taken.data_ptr())
        held = taken
        del taken
    assert held is not None
    assert len(places) == 2


def test_held_read_buffer_is_not_reused() -> None:
    buffers = ReadBuffers(1 << 20)
    kept = []
    for i in range(10):
        taken = buffers.take(100_000)
        taken.fill_(i)
        # a view of a part is enough
        kept.append(taken[5_000:6_000].view(torch.int16))
        del taken
    buffers.give_back()
    for i, tensor in enumerate(kept):
        assert set(tensor.view(torch.uint8).tolist()) == {i}


def test_read_buffers_are_given_back() -> None:
    buffers = ReadBuffers(64 << 20)
    for _ in range(2):
        last = buffers.take(64 << 20)
        last.fill_(1)
    last = buffers.take(1000)
    used = resident()
    buffers.give_back()
    # both buffers, except a few pages of the held tensor
    assert used - resident() > 120 << 20
    assert last.sum() == 1000


def resident() -> int:
    return memory.resident(os.getpid())
