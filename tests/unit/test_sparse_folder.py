"""A sparse folder is read as its manifest says, or refused before its first tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_inflight.messages import SparseFolderSource
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources import checkpoint_files
from sglang_inflight.scheduler.update.sources.disk import Folder
from sglang_inflight.scheduler.update.sources.regular_file import RegularFile
from sglang_inflight.scheduler.update.sources.sparse_folder import read_sparse_folder
from sglang_inflight.vocabulary.errors import Conflict, Refused
from tests.support.sparse import describe, pair, write_folder
from tests.support.updates import Weights

FIRST = pair("b.weight", torch.tensor([5, 1], dtype=torch.int32), torch.ones(2).bfloat16())
FIRST |= pair("a.weight", [2], torch.zeros(1))
SECOND = pair("c.weight", [0, 7], torch.ones(2))
LAST = "part-1.safetensors"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and hash the test's small files in several pieces."""
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "changes", FIRST, SECOND, base_version="v1")


def begin(
    folder: Path, served: str = "", refuse_another: Callable[[Folder], None] = lambda folder: None
) -> Iterator[tuple[str, torch.Tensor]]:
    def require_base(digests: tuple[str, ...]) -> None:
        if served not in digests:
            raise Conflict(f"{served} is served, and not {digests}")

    return read_sparse_folder(
        SparseFolderSource(model_path=str(folder)),
        torch.device("cpu"),
        base_version="v1",
        require_base=require_base,
        refuse_another=refuse_another,
        check=lambda: None,
        rate_limit=UNPACED,
    )


def read(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in begin(folder)]


def test_pairs_of_every_file_come_together(folder: Path) -> None:
    found = read(folder)
    assert [name for name, _ in found] == [
        f"{name}.weight.{half}" for name in "abc" for half in ("indices", "values")
    ]
    for name, tensor in (FIRST | SECOND).items():
        assert torch.equal(dict(found)[name], tensor), name
        assert dict(found)[name].dtype == tensor.dtype


def test_file_without_tensors_is_no_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "changes", FIRST, {}, base_version="v1")
    assert len(read(folder)) == 4


def test_each_byte_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    read_into = RegularFile.read_into

    def count(self: RegularFile, buffer: memoryview, offset: int) -> int:
        nbytes = read_into(self, buffer, offset)
        counts[self.name] = counts.get(self.name, 0) + nbytes
        return nbytes

    monkeypatch.setattr(RegularFile, "read_into", count)
    read(folder)
    assert counts == {file.name: file.stat().st_size for file in folder.iterdir()}


def test_another_base_version_is_a_conflict(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "changes", FIRST, base_version="v7")
    with pytest.raises(Conflict, match=r"base_version in sparse.json is 'v7', but 'v1' is serving"):
        read(folder)


def test_folder_of_another_model_is_refused_before_the_first_tensor(folder: Path) -> None:
    def refuse_another(folder: Folder) -> None:
        raise Refused("another model's")

    with pytest.raises(Refused, match=r"checkpoint '.*changes': another model's"):
        next(begin(folder, refuse_another=refuse_another))


def test_other_weights_of_the_bases_name_are_a_conflict(tmp_path: Path) -> None:
    a, b, c = ("a" * 16, "b" * 16, "c" * 16)
    folder = write_folder(tmp_path / "changes", FIRST, base_version="v1", base_digests=[a, b])
    with pytest.raises(Conflict, match=f"{c} is served"):
        next(begin(folder, served=c))
    assert next(begin(folder, served=b))


def flip_last_byte(folder: Path) -> None:
    content = bytearray((folder / LAST).read_bytes())
    content[-1] ^= 1
    (folder / LAST).write_bytes(content)


def flip_header(folder: Path) -> None:
    """Rename a tensor: the file stays valid."""
    content = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(content.replace(b"c.weight", b"d.weight"))


def cut(folder: Path) -> None:
    os.truncate(folder / LAST, (folder / LAST).stat().st_size - 1)


def remove(folder: Path) -> None:
    (folder / LAST).unlink()


def make_folder_of_file(folder: Path) -> None:
    (folder / LAST).unlink()
    (folder / LAST).mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "wrong byte": (flip_last_byte, rf"{LAST} has the SHA-256"),
    "wrong header": (flip_header, rf"{LAST} has the SHA-256"),
    "short": (cut, LAST),
    "missing": (remove, rf"'{LAST}' of sparse.json is missing"),
    "a folder": (make_folder_of_file, rf"{LAST} is no regular file"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_refused_before_the_first_tensor(
    folder: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder)
    reading = begin(folder)
    with pytest.raises(Refused, match=reason):
        next(reading)


KNOWN = {"sha256": "0" * 64, "bytes": 1}
MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "another"}, "sparse.json cannot be read"),
    "format version": ({"format_version": 2}, "sparse.json cannot be read"),
    "no base": ({"base_version": None}, "base_version"),
    "no digest of the base": ({"base_digests": ["zz"]}, "base_digests"),
    "no checksum": ({"files": {"a.safetensors": {"bytes": 1}}}, "sha256"),
    "no digest": ({"files": {"a.safetensors": {**KNOWN, "sha256": "zz"}}}, "sha256"),
    "surplus": ({"files": {}}, "'part-0.safetensors', 'part-1.safetensors' is not in sparse.json"),
    "other folder": ({"files": {"../x.safetensors": KNOWN}}, r"'../x.safetensors' is not the name"),
    "absolute": ({"files": {"/x.safetensors": KNOWN}}, r"'/x.safetensors' is not the name"),
    "sub-folder": ({"files": {"x/y.safetensors": KNOWN}}, r"'x/y.safetensors' is not the name"),
    "other kind": ({"files": {"x.bin": KNOWN}}, r"'x.bin' is not the name"),
}


@pytest.mark.parametrize(("manifest", "reason"), MANIFESTS.values(), ids=MANIFESTS)
def test_bad_manifest_is_refused(folder: Path, manifest: dict[str, Any], reason: str) -> None:
    describe(folder, **{"base_version": "v1", **manifest})
    with pytest.raises(Refused, match=reason):
        read(folder)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "[" * 100_000])
def test_unreadable_manifest_is_refused(folder: Path, content: str | None) -> None:
    manifest = folder / "sparse.json"
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    with pytest.raises(Refused, match=r"sparse\.json"):
        read(folder)


def test_wrong_size_is_refused_by_the_files_name(folder: Path) -> None:
    manifest = json.loads((folder / "sparse.json").read_text())
    manifest["files"][LAST]["bytes"] += 1
    (folder / "sparse.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match=rf"{LAST} has \d+ bytes, not \d+"):
        read(folder)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            [{"a.indices": torch.tensor([1])}, {"a.values": torch.ones(1)}],
            r"'a' lacks 'a\.values' in part-0\.safetensors",
        ),
        ([FIRST, {"a": torch.ones(1)}], r"NAME\.indices"),
        ([FIRST, FIRST], "is in part-0.safetensors and in part-1.safetensors"),
    ],
    ids=["parted", "whole", "twice"],
)
def test_file_with_half_a_pair_is_refused(
    tmp_path: Path, parts: list[Weights], reason: str
) -> None:
    folder = write_folder(tmp_path / "changes", *parts, base_version="v1")
    with pytest.raises(Refused, match=reason):
        read(folder)


def test_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="is not a directory on the server"):
        read(tmp_path / "file")
