"""Writes the files of a save, and deletes them. Each access is made by an abandonable thread."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Dropped,
    InflightError,
    Refused,
    describe,
    shorten,
)
from sglang_inflight.vocabulary.served import MANIFEST, RankPart, part_file, tensors_file

_DRAFT = ".draft"
# a mount that stalls keeps what is to be deleted
_DELETE_S = 10.0


@contextmanager
def new_file(folder: str, name: str, thread: AbandonableThread) -> Iterator[NewFile]:
    """Create a file, and the folder if need be. Delete the file if the block raises.

    Raises ``Conflict`` if the file is there, and ``Refused`` if it cannot be created.
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
            raise Conflict(
                f"{name} is there already: name another folder, or discard what was saved there"
            ) from None

    def write(self, content: memoryview | bytes) -> None:
        left = memoryview(content)
        while len(left):
            left = left[self._file.write(left) :]

    def finish(self) -> None:
        """Write to the disk: some file systems report a lack of room only then."""
        os.fsync(self._file.fileno())
        self._file.close()

    def delete(self) -> None:
        os.unlink(self.path)
        self._file.close()


def write_manifest(folder: str, content: bytes, check: Callable[[], None]) -> None:
    """Write the manifest whole, under a name that appears at once."""
    with AbandonableThread(check) as thread:
        with new_file(folder, MANIFEST + _DRAFT, thread) as file:
            thread.do(lambda: file.write(content))
        with naming(folder):
            thread.do(lambda: os.rename(file.path, os.path.join(folder, MANIFEST)))


def delete(
    folder: str, rank: str, save_id: str | None, *, is_first: bool, check: Callable[[], None]
) -> None:
    """Delete the files of ``rank``, with ``is_first`` the manifest before, and the empty folder.

    Files of another save than ``save_id`` are left, if it is given. Raises ``Refused`` for files
    that are not ours.
    """

    def delete_now() -> None:
        part = Path(folder, part_file(rank))
        with suppress(FileNotFoundError):
            found = msgspec.json.decode(part.read_bytes(), type=RankPart)
            if save_id not in (None, found.save_id):
                return
            if is_first:
                Path(folder, MANIFEST).unlink(missing_ok=True)
            Path(folder, tensors_file(rank)).unlink(missing_ok=True)
            part.unlink()
        with suppress(OSError):
            # while another rank's files are there, that rank deletes the folder
            os.rmdir(folder)

    with AbandonableThread(check) as thread, naming(folder):
        thread.do(delete_now)


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
    except (OSError, msgspec.DecodeError) as error:
        raise Refused(f"the folder {shorten(folder)!r}: {describe(error)}") from error
