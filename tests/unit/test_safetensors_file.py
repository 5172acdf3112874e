"""Our reader of the safetensors format accepts the same files as the format's library."""

from __future__ import annotations

import json
import os
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_inflight.scheduler.update.sources import stretch
from sglang_inflight.scheduler.update.sources.batches import Packed
from sglang_inflight.scheduler.update.sources.safetensors_file import (
    _DTYPES,
    EVERYTHING,
    Indexes,
    SafetensorsFile,
    Wanted,
)
from sglang_inflight.vocabulary.errors import Refused


def read(path: Path) -> dict[str, torch.Tensor]:
    with closing(SafetensorsFile(str(path), path.name)) as file:
        content = torch.frombuffer(bytearray(file.read(file.size, 0)), dtype=torch.uint8)
        packed = Packed(content)
        return {
            place.name: packed.view_or_copy(place.start, place.end, place.dtype, place.shape)
            for place in file.places
        }


def write(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> Any:
    return {"dtype": dtype, "shape": shape or [end - start], "data_offsets": [start, end]}


def test_every_dtype_is_read_like_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw = torch.arange(48, dtype=torch.uint8)
    weights = {
        # bools are 0 or 1
        name: (raw % 2).view(dtype) if dtype is torch.bool else raw.view(dtype)
        for name, dtype in _DTYPES.items()
        if name != "F8_E8M0"
    }
    weights |= {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 5),
        "matrix": torch.randn(7, 3),
        'name with "quotes" and ü': torch.ones(1),
    }
    save_file({name: tensor.clone() for name, tensor in weights.items()}, path, {"format": "pt"})
    found = read(path)
    with safe_open(path, framework="pt") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            expected = library.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert torch.equal(
                tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
            )


def test_stretches_have_neighbours_among_the_wanted_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = {name: entry(at, at + 1) for at, name in enumerate("abcdef")}
    path = write(tmp_path / "x", header, b"012345")
    monkeypatch.setattr(stretch, "MOST_BYTES", 2)
    with closing(SafetensorsFile(str(path), "x")) as file:
        chosen = file.index.choose(Wanted(lambda place: place.name not in "ce"))
        wanted = [(s.names, start - file.start, s.nbytes) for s, start in chosen.wanted]
        assert wanted == [(["a", "b"], 0, 2), (["d"], 3, 1), (["f"], 5, 1)]
        assert [s.names for s in chosen.others] == [["c", "e"]]
        assert [len(s.names) for s, _ in file.index.choose(EVERYTHING).wanted] == [2, 2, 2]


def test_header_of_an_earlier_file_is_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes = Indexes()

    def opened(name: str, header: Any, content: bytes) -> Any:
        path = write(tmp_path / name, header, content)
        with closing(SafetensorsFile(str(path), name, indexes)) as file:
            indexes.keep([file])
            return file.index

    header = {"a": entry(0, 4), "b": entry(4, 8)}
    first = opened("x", header, bytes(8))
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "_parse", None)
        assert opened("y", header, bytes(range(8))) is first
    other = opened("z", {"b": entry(0, 4), "a": entry(4, 8)}, bytes(8))
    assert [place.name for place in other.places] == ["b", "a"]
    # a file that was cut short has the header of a whole one
    indexes.keep([])
    opened("x", header, bytes(8))
    with pytest.raises(Refused, match="it should have"):
        opened("cut", header, bytes(7))


def test_unaligned_tensor_is_read(tmp_path: Path) -> None:
    value = torch.randn(5)
    header = {"a": entry(0, 1), "b": entry(1, 21, [5], "F32")}
    path = write(tmp_path / "x", header, b"\1" + value.numpy().tobytes())
    assert torch.equal(read(path)["b"], value)


@pytest.mark.parametrize(
    ("header", "content", "words"),
    [
        (b"", b"", "header"),
        (b"{", b"", "header"),
        (b"[]", b"", "header"),
        (b'{"a": 1}', b"", "header"),
        (b'{"a": {"dtype": "U8"}}', b"", "shape"),
        (b"\xff" * 9, b"", "header"),
        (b"[" * 100_000, b"", "header"),
        ({"a": entry(0, 4, dtype="Q4")}, b"1234", "'Q4'"),
        ({"a": entry(0, 4, [-4])}, b"1234", "shape"),
        ({"a": entry(0, 4, [2**70])}, b"1234", "'a'"),
        ({"a": entry(0, 4, [3])}, b"1234", "'a'"),
        ({"a": entry(4, 0, [4])}, b"1234", "'a'"),
        ({"a": entry(0, 4)}, b"123", "7"),
        ({"a": entry(0, 4)}, b"12345", "bytes"),
        ({"a": entry(1, 4)}, b"1234", "'a'"),
        ({"a": entry(0, 3), "b": entry(2, 4)}, b"1234", "'b'"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, b"1234", "'b'"),
    ],
)
def test_inconsistent_safetensors_file_is_refused(
    tmp_path: Path, header: Any, content: bytes, words: str
) -> None:
    path = write(tmp_path / "x.safetensors", header, content)
    if words == "7":
        words = str(path.stat().st_size)
    with pytest.raises(Refused, match=r"x\.safetensors is not a valid safetensors file") as refused:
        SafetensorsFile(str(path), path.name)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("length", [9, 1 << 40, (1 << 64) - 1])
def test_truncated_header_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(Refused, match=f"{length} bytes"):
        SafetensorsFile(str(path), path.name)


def test_oversized_header_is_refused_unread(tmp_path: Path) -> None:
    """The file has no blocks and is larger than memory, so its header must not be read."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(path, 1 << 41)
    with pytest.raises(Refused, match="at most"):
        SafetensorsFile(str(path), path.name)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
def test_irregular_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Opening a pipe would wait for a writer."""
    path = tmp_path / "x.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    expected = "cannot be opened" if kind == "nothing" else "no regular file"
    with pytest.raises(Refused, match=rf"x\.safetensors.*{expected}"):
        SafetensorsFile(str(path), path.name)
