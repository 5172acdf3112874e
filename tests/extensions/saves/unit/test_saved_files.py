"""A discard deletes what a save has written, however much of it, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from sglang_inflight.extensions.saves import files
from sglang_inflight.extensions.saves.files import (
    check_of,
    metadata_of,
    new_file,
    refuse_manifest,
    write_manifest,
)
from sglang_inflight.extensions.saves.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    RankPart,
    part_file,
    tensors_file,
)
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.safetensors_file import write_head
from sglang_inflight.vocabulary.errors import Conflict, Refused

RANK = "pp0-tp0"
TENSORS, PART, DRAFT = tensors_file(RANK), part_file(RANK), f"{MANIFEST}.draft"


class Content(NamedTuple):
    """The bytes of a whole save, by the names of its files."""

    tensors: bytes
    part: bytes
    manifest: bytes


def content_of(save_id: str = "one") -> Content:
    weight = torch.arange(6.0)
    head = write_head([("w", weight)], metadata_of(save_id))
    part = RankPart(FORMAT, save_id, {"device": "cpu"}, {"w": "0" * 16}, {})
    manifest = Manifest(FORMAT, 1, save_id, "v1", {})
    return Content(
        head + weight.numpy().tobytes(), msgspec.json.encode(part), msgspec.json.encode(manifest)
    )


def whole(folder: Path, save_id: str = "one", rank: str = RANK) -> None:
    """Write a save as a rank does."""
    content = content_of(save_id)
    with AbandonableThread(check_of(60)) as thread:
        for name, written in (
            (tensors_file(rank), content.tensors),
            (part_file(rank), content.part),
        ):
            with new_file(str(folder), name, thread) as file:
                file.write(written)
    if rank == RANK:
        write_manifest(str(folder), content.manifest, check_of(60))


def discard(folder: Path, save_id: str | None = None, rank: str = RANK) -> None:
    files.delete(
        str(folder), rank, save_id, is_first=rank == RANK, ranks={RANK}, check=check_of(60)
    )


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_whole_save_is_discarded(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    whole(folder)
    assert names_in(folder) == [PART, TENSORS, MANIFEST]
    discard(folder)
    assert not folder.exists()
    discard(folder)


LEFT: dict[str, Callable[[Content, Callable[[bytes], bytes]], dict[str, bytes]]] = {
    "tensors": lambda all, cut: {TENSORS: cut(all.tensors)},
    "part": lambda all, cut: {TENSORS: all.tensors, PART: cut(all.part)},
    "manifest's name": lambda all, cut: {TENSORS: all.tensors, PART: all.part, MANIFEST: b""},
    "draft": lambda all, cut: {
        TENSORS: all.tensors,
        PART: all.part,
        MANIFEST: b"",
        DRAFT: cut(all.manifest),
    },
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 30, 60, 1000])
@pytest.mark.parametrize("zeros", [False, True], ids=["killed", "without power"])
def test_what_a_killed_save_leaves_can_be_discarded(
    tmp_path: Path,
    left: Callable[[Content, Callable[[bytes], bytes]], dict[str, bytes]],
    length: int,
    zeros: bool,
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()

    def cut(content: bytes) -> bytes:
        missing = len(content) - length if zeros else 0
        return content[:length] + bytes(max(0, missing))

    for name, content in left(content_of(), cut).items():
        (folder / name).write_bytes(content)
    with pytest.raises(Conflict, match="is there already"):
        whole(folder)
    discard(folder)
    assert not folder.exists()
    whole(folder)


@pytest.mark.parametrize("name", [TENSORS, PART, MANIFEST])
@pytest.mark.parametrize("content", [b"{}", b'{"format":"mine"}', b"12345678{}, and more" * 9])
def test_file_of_another_origin_stays(tmp_path: Path, name: str, content: bytes) -> None:
    if name == TENSORS and len(content) < 8:
        content = bytes(8) + content
    whole(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=f"{name} is no file of a save"):
        discard(tmp_path)
    assert names_in(tmp_path) == [PART, TENSORS, MANIFEST]
    # a save that has failed deletes its own files
    discard(tmp_path, "one")
    assert names_in(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("name", [TENSORS, PART, MANIFEST, DRAFT])
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)],
    ids=["pipe", "folder", "link to /dev/zero"],
)
def test_only_regular_files_are_read(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    with pytest.raises(Refused, match=f"{name} is no regular file"):
        discard(tmp_path)
    discard(tmp_path, "one")
    assert names_in(tmp_path) == [name]


def test_empty_folder_that_is_no_save_stays(tmp_path: Path) -> None:
    discard(tmp_path)
    discard(tmp_path, "one")
    assert tmp_path.exists()


def test_folder_of_a_failed_file_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with (
        AbandonableThread(check_of(60)) as thread,
        pytest.raises(Conflict, match="moved on"),
        new_file(str(folder), TENSORS, thread),
    ):
        raise Conflict("moved on")
    assert not folder.exists()


def test_failed_save_deletes_no_file_of_another_save(tmp_path: Path) -> None:
    whole(tmp_path, "other")
    discard(tmp_path, "one")
    assert names_in(tmp_path) == [PART, TENSORS, MANIFEST]
    discard(tmp_path, "other")
    assert not tmp_path.exists()


def test_manifest_of_another_origin_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("mine")
    with pytest.raises(Conflict, match=MANIFEST):
        refuse_manifest(str(tmp_path))
    with pytest.raises(Conflict, match=MANIFEST):
        write_manifest(str(tmp_path), b"{}", check_of(60))
    assert names_in(tmp_path) == [MANIFEST]
    assert (tmp_path / MANIFEST).read_text() == "mine"


def test_manifest_that_cannot_be_moved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError("no move")

    monkeypatch.setattr(os, "rename", fail)
    folder = tmp_path / "saved"
    with pytest.raises(Refused, match="no move"):
        write_manifest(str(folder), b"{}", check_of(60))
    assert not folder.exists()


def test_ranks_that_the_server_lacks_are_discarded(tmp_path: Path) -> None:
    """A server of more ranks has saved there, and does not return."""
    folder = tmp_path / "saved"
    for rank in ("pp1-tp0", "pp0-tp1", RANK):
        whole(folder, rank=rank)
    discard(folder)
    assert not folder.exists()


def test_each_rank_discards_its_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    whole(folder, rank="pp0-tp1")
    whole(folder)
    all_ranks = {RANK, "pp0-tp1"}
    for rank in (RANK, "pp0-tp1"):
        files.delete(
            str(folder), rank, None, is_first=rank == RANK, ranks=all_ranks, check=check_of(60)
        )
        assert folder.exists() == (rank == RANK)
