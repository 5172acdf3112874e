"""Reads all files of one checkpoint, or only the names, shapes and dtypes of its tensors.

All files are opened before the first tensor, and must be unchanged at the end. So the tensors are
of one checkpoint, even if the next one is being written over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Packed, Weights
from sglang_inflight.scheduler.update.sources.regular_file import ReadBuffers, RegularFile, Stream
from sglang_inflight.scheduler.update.sources.safetensors_file import (
    EVERYTHING,
    Indexes,
    SafetensorsFile,
    Wanted,
)
from sglang_inflight.scheduler.update.sources.stretch import Take, rest_of, take_none
from sglang_inflight.vocabulary.errors import Refused, describe, shorten

# Bytes of one read. They stay in a cache until they are copied.
PIECE_BYTES = 4 << 20

# The headers of all files: the tensors of the largest models need 20 MB, and their index as much.
_MOST_HEADERS_BYTES = 64 << 20

# where a model's config has the config of its quantization
QUANTIZATION_CONFIGS = ("quantization_config", "compression_config")

F = TypeVar("F", bound=RegularFile)
Shapes = dict[str, tuple[int, ...]]


class Stored(NamedTuple):
    """The shape and dtype in which a checkpoint stores a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_safetensors(
    paths: list[str],
    thread: AbandonableThread,
    rate_limit: RateLimit,
    *,
    forgets_pages: bool = False,
    wants: Wanted = EVERYTHING,
    take: Take = take_none,
    indexes: Indexes | None = None,
) -> Weights:
    """Yield the tensors of each file, in the file's order, less those that ``take`` takes.

    First come those that ``wants`` leaves out, each without memory, as its header describes it. The
    next stretch is read while the caller works on the current one. ``forgets_pages`` asks the
    kernel to drop a read file from memory. ``indexes`` are used, and keep these files' headers.
    """
    with _opened_safetensors(paths, thread, indexes) as files:
        # before the first tensor is used, on which the answers may hang
        chosen = [(file, file.index.choose(wants)) for file in files]
        for _, (_, others) in chosen:
            for stretch in others:
                yield from rest_of(stretch, None, take)
        reads = [(file, *each) for file, (wanted, _) in chosen for each in wanted]
        buffers = ReadBuffers(max((stretch.nbytes for _, stretch, _ in reads), default=0))
        # a limit for the reading thread, which sleeps by itself
        rate_limit = rate_limit.for_another_thread()

        def begin(index: int) -> torch.Tensor | None:
            if index == len(reads):
                return None
            file, stretch, start = reads[index]
            content = buffers.take(max(1, stretch.nbytes))[: stretch.nbytes]
            is_last = index + 1 == len(reads) or reads[index + 1][0] is not file

            def read() -> None:
                _read(file, content, start, rate_limit)
                if is_last:
                    _finish(file, forgets_pages)

            thread.begin(read)
            return content

        coming = begin(0)
        try:
            for index, (_, stretch, _) in enumerate(reads):
                thread.end()
                content, coming = coming, begin(index + 1)
                yield from rest_of(stretch, content, take)
                # a reference would keep the buffer from its next use
                del content
        finally:
            del coming
            buffers.give_back()


def _read(file: SafetensorsFile, content: torch.Tensor, start: int, rate_limit: RateLimit) -> None:
    """Fill ``content`` from byte ``start`` on, a piece at a time, as fast as staging may go.

    A caller that gives up closes the file, and then the next read fails.
    """
    view = content.numpy().data
    done = 0
    while done < len(view):
        read = file.read_into(view[done : done + PIECE_BYTES], start + done)
        if not read:
            raise file.was_cut()
        rate_limit.spend(read)
        done += read


class Expected(NamedTuple):
    """A file's path, and the size and SHA-256 (hexadecimal) that it must have."""

    path: str
    nbytes: int
    sha256: str


def read_verified(
    expected: Sequence[Expected],
    check_names: Callable[[Set[str], str], None],
    thread: AbandonableThread,
    rate_limit: RateLimit,
) -> Weights:
    """Yield the tensors of safetensors files, each file's ordered by name.

    All files are read and verified before the first tensor. Until then they are in the host's
    memory. ``check_names`` gets the names in each file, and the file's name; it raises ``Refused``.
    """
    with _opened_safetensors([one.path for one in expected], thread) as files:
        for file, one in zip(files, expected, strict=True):
            if file.size != one.nbytes:
                raise Refused(f"{file.name} has {file.size} bytes, not {one.nbytes}")
            check_names({place.name for place in file.places}, file.name)
        buffers = ReadBuffers(max((file.size - file.start for file in files), default=0))
        rate_limit = rate_limit.for_another_thread()
        contents: list[torch.Tensor] = []
        try:
            for file, one in zip(files, expected, strict=True):
                nbytes = file.size - file.start
                contents.append(buffers.take(max(1, nbytes))[:nbytes])
                thread.do(partial(_read_and_verify, file, contents[-1], one.sha256, rate_limit))
            for file in files:
                content = Packed(contents.pop(0))
                for place in sorted(file.places, key=lambda place: place.name):
                    begin, end = place.start - file.start, place.end - file.start
                    yield place.name, content.view_or_copy(begin, end, place.dtype, place.shape)
        finally:
            contents.clear()
            buffers.give_back()


def _read_and_verify(
    file: SafetensorsFile, content: torch.Tensor, sha256: str, rate_limit: RateLimit
) -> None:
    if file.places:
        _read(file, content, file.start, rate_limit)
        _finish(file, forgets_pages=False)
    digest = file.head_sha256.copy()
    for piece in content.split(PIECE_BYTES):
        digest.update(piece.numpy().data)
        rate_limit.spend(len(piece))
    if digest.hexdigest() != sha256:
        raise Refused(f"{file.name} has the SHA-256 {digest.hexdigest()}, not {sha256}")


def read_pickled(
    paths: list[str],
    thread: AbandonableThread,
    rate_limit: RateLimit,
    *,
    forgets_pages: bool = False,
) -> Weights:
    """Yield the tensors of ``torch.save`` files, each read whole: its tensors have no order."""
    seen: dict[str, str] = {}
    with _opened(paths, RegularFile, thread) as files:
        for file in files:
            tensors = thread.do(partial(_unpickle, file))
            rate_limit.spend(file.size)
            _refuse_twice(file.name, tensors, seen)
            for name in list(tensors):
                # out of the dict: a full dict would keep all memory to the end
                yield name, tensors.pop(name)
            thread.do(partial(_finish, file, forgets_pages))


@contextmanager
def _opened_safetensors(
    paths: list[str], thread: AbandonableThread, indexes: Indexes | None = None
) -> Iterator[list[SafetensorsFile]]:
    """Open the files. What their headers hold together is limited, before all are in memory."""
    seen: dict[str, str] = {}
    header_bytes = 0
    # files of the last reading, which have no name twice
    known: list[SafetensorsFile] = []
    is_known = True

    def look(file: SafetensorsFile) -> None:
        nonlocal header_bytes, is_known
        header_bytes += file.start
        if header_bytes > _MOST_HEADERS_BYTES:
            raise Refused(
                f"the headers of its files have {header_bytes} bytes up to {file.name}, at most "
                f"{_MOST_HEADERS_BYTES} are allowed"
            )
        is_known &= file.is_known and all(each.index is not file.index for each in known)
        known.append(file)
        if not is_known:
            for each in known:
                _refuse_twice(each.name, (place.name for place in each.places), seen)
            known.clear()

    kind = partial(SafetensorsFile, indexes=indexes)
    with _opened(paths, kind, thread, look) as files:
        if indexes is not None:
            indexes.keep(files)
        yield files


@contextmanager
def _opened(
    paths: list[str],
    kind: Callable[[str, str], F],
    thread: AbandonableThread,
    look: Callable[[F], None] = lambda file: None,
) -> Iterator[list[F]]:
    """Open the files. ``look`` gets each one before the next is opened."""
    files: list[F] = []
    with ExitStack() as stack:
        for path in paths:
            file = thread.do(partial(kind, path, os.path.basename(path)))
            stack.callback(file.close)
            look(file)
            files.append(file)
        yield files
        for file in files:
            thread.do(file.check_unchanged)


def _finish(file: RegularFile, forgets_pages: bool) -> None:
    # checked again at the end with all files, but an early failure is better
    file.check_unchanged()
    if forgets_pages:
        file.forget_pages()


def _unpickle(file: RegularFile) -> dict[str, Any]:
    try:
        with Stream.of(file) as stream:
            tensors = torch.load(stream, map_location="cpu", weights_only=True)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{file.name} cannot be read: {describe(error)}") from error
    if not isinstance(tensors, dict):
        raise Refused(f"{file.name} must hold tensors by name, not a {type(tensors).__name__}")
    return tensors


def _refuse_twice(file: str, names: Iterable[str], seen: dict[str, str]) -> None:
    """Raise ``Refused`` for a name in two files: without an index both could be meant.

    ``seen`` has the file of each name so far.
    """
    for name in names:
        if (first := seen.setdefault(name, file)) != file:
            raise Refused(f"tensor {shorten(name)!r} is in {first} and in {file}")


def read_stored(folder: Path) -> dict[str, Stored]:
    """Return what the checkpoint in ``folder`` stores; empty if it is not there in safetensors."""
    stored: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with closing(SafetensorsFile(str(file), file.name)) as tensors:
            stored |= {place.name: Stored(place.shape, place.dtype) for place in tensors.places}
    return stored


def read_quantization_config(folder: Path) -> dict[str, Any]:
    """Return the quantization config of the checkpoint in ``folder``; empty if it has none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refused(f"{file.name} cannot be read: {shorten(str(error))}") from error
    for part in config, config.get("text_config") or {}:
        for key in QUANTIZATION_CONFIGS:
            if isinstance(found := part.get(key), dict):
                return found
    return {}


def find_checkpoint(model_path: str, revision: str | None, cache: str | None) -> Path:
    """Return the folder of a checkpoint on this machine; it may not exist.

    ``model_path`` is a directory or a name on the Hub. The files of a name are looked up in
    ``cache`` (None: the Hub's own) and never fetched.
    """
    path = Path(model_path)
    if path.is_dir():
        return path
    try:
        return Path(
            snapshot_download(model_path, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return path
