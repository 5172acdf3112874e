"""Writes the files of a save, and deletes them. Each access is made by an abandonable thread.

A killed process leaves a part of these files, each cut short anywhere. So every file begins with a
mark, and a deletion looks for it: a file of another origin stays.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec

from sglang_inflight.extensions.saves.manifest import (
    FORMAT,
    MANIFEST,
    part_file,
    tensors_file,
)
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.regular_file import RegularFile
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Dropped,
    InflightError,
    Refused,
    describe,
    shorten,
)

_DRAFT = MANIFEST + ".draft"
_RANKS_FILE = re.compile(r"rank-(pp\d+-tp\d+)\.(?:json|safetensors)")
# a mount that stalls keeps what is to be deleted
_DELETE_S = 10.0
# a safetensors file begins with the length of its header
_LENGTH_BYTES = 8


def metadata_of(save_id: str) -> dict[str, str]:
    """Return the mark in the head of a tensors' file."""
    return {"format": FORMAT, "save_id": save_id}


@contextmanager
def new_file(folder: str, name: str, thread: AbandonableThread) -> Iterator[NewFile]:
    """Create a file, and the folder if need be. If the block raises, delete the file.

    An empty folder is then deleted, too. Raises ``Conflict`` if the file is there, and ``Refused``
    if it cannot be created.
    """
    with naming(folder):
        file = thread.do(lambda: NewFile(folder, name))
        try:
            yield file
            thread.do(file.finish)
        except BaseException:
            # the thread may be in a call that never returns
            with (
                suppress(InflightError, OSError),
                AbandonableThread(check_of(_DELETE_S)) as another,
            ):
                another.do(file.delete)
            raise


class NewFile:
    """A file that is being written. After ``delete`` a late ``write`` raises ``ValueError``."""

    def __init__(self, folder: str, name: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, name)
        try:
            self._file = io.FileIO(self.path, "xb")
        except FileExistsError:
            raise _is_there(name) from None

    def write(self, content: memoryview | bytes) -> None:
        left = memoryview(content)
        while len(left):
            left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Write to the disk: some file systems report a lack of room only then."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self.sync()
        self._file.close()

    def delete(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file.close()
        _delete_empty(os.path.dirname(self.path))


def refuse_manifest(folder: str) -> None:
    """Raise ``Conflict`` if the folder has a manifest, or a part of one."""
    for name in (MANIFEST, _DRAFT):
        if os.path.lexists(os.path.join(folder, name)):
            raise _is_there(name)


def write_manifest(folder: str, content: bytes, check: Callable[[], None]) -> None:
    """Write the manifest whole, under a name that appears at once.

    An empty file takes the name before, so no file of another origin is replaced.
    """
    with (
        AbandonableThread(check) as thread,
        new_file(folder, MANIFEST, thread) as manifest,
        new_file(folder, _DRAFT, thread) as draft,
    ):
        thread.do(lambda: draft.write(content))
        thread.do(draft.sync)
        with naming(folder):
            thread.do(lambda: os.rename(draft.path, manifest.path))


def delete(
    folder: str,
    rank: str,
    save_id: str | None,
    *,
    is_first: bool,
    ranks: Set[str],
    check: Callable[[], None],
) -> None:
    """Delete the files of ``rank``, whole or cut short, and then the folder if it is empty.

    With ``is_first`` delete the manifest before, and the files of ranks that are not among
    ``ranks``, this server's. With ``save_id`` delete the files of this save alone. Without it raise
    ``Refused`` for a file that is not ours, before anything is deleted.
    """

    def delete_now() -> None:
        mine = {rank} | (_ranks_in(folder) - ranks if is_first else set())
        files = [*_find(folder, sorted(mine), save_id, with_manifest=is_first)]
        for name in files:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        if files:
            # while another rank's files are there, that rank deletes the folder
            _delete_empty(folder)

    with AbandonableThread(check) as thread, naming(folder):
        try:
            thread.do(delete_now)
        except Refused as error:
            raise type(error)(f"the folder {shorten(folder)!r}: {error}") from error


def _ranks_in(folder: str) -> set[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    return {found[1] for found in map(_RANKS_FILE.fullmatch, names) if found}


def _find(
    folder: str, ranks: Iterable[str], save_id: str | None, *, with_manifest: bool
) -> Iterator[str]:
    """Yield the names of files to delete, the manifest first: without it no folder is whole."""
    # fields of our manifest, as the files are encoded
    mark: dict[str, Any] = {"format": FORMAT}
    manifest = mark | {"format_version": 1}
    if save_id is not None:
        mark, manifest = metadata_of(save_id), manifest | {"save_id": save_id}
    looks: list[tuple[str, Callable[[str, str], bool]]] = []
    if with_manifest:
        looks.append((MANIFEST, _begins_with(_encode(manifest), save_id)))
        # its name is ours alone, and nobody reads it
        if save_id is None:
            looks.append((_DRAFT, _is_regular))
    head = b'{"__metadata__":' + _encode(mark)
    for rank in ranks:
        looks.append((tensors_file(rank), _begins_with(head, save_id, offset=_LENGTH_BYTES)))
        looks.append((part_file(rank), _begins_with(_encode(mark), save_id)))
    for name, is_ours in looks:
        path = os.path.join(folder, name)
        if os.path.lexists(path) and is_ours(path, name):
            yield name


def _encode(mark: dict[str, Any]) -> bytes:
    return msgspec.json.encode(mark).removesuffix(b"}")


def _begins_with(
    mark: bytes, save_id: str | None, *, offset: int = 0
) -> Callable[[str, str], bool]:
    """Return what tells whether a file has ``mark`` at ``offset``.

    Without ``save_id`` a file that was cut short within its mark is ours, too, and one of zeros: a
    machine that loses its power may leave those. Then any other file raises ``Refused``.
    """

    def look(path: str, name: str) -> bool:
        try:
            with closing(RegularFile(path, name, follows_links=False)) as file:
                found = file.read(min(file.size, offset + len(mark)), 0)[offset:]
        except Refused:
            if save_id is None:
                raise
            return False
        if found == mark or save_id is not None:
            return found == mark
        if not mark.startswith(found.rstrip(b"\0")):
            raise Refused(f"{name} is no file of a save: move it away, or delete it")
        return True

    return look


def _is_regular(path: str, name: str) -> bool:
    """Return True. Raises ``Refused`` for a link, a folder or a device."""
    RegularFile(path, name, follows_links=False).close()
    return True


def _delete_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)


def _is_there(name: str) -> Conflict:
    return Conflict(
        f"{name} is there already: name another folder, or discard what was saved there"
    )


def check_of(seconds: float) -> Callable[[], None]:
    """Return what raises ``Dropped`` when ``seconds`` are over."""
    ends_at = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > ends_at:
            raise Dropped("the call's time ran out")

    return check


@contextmanager
def naming(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"the folder {shorten(folder)!r}: {describe(error)}") from error
