"""The files of a checkpoint, from the first to the last.

They are all opened before a tensor is handed out, and at the end all must be what they were
then: so what was read is of one checkpoint, though somebody may be writing the next over it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.staging.aside import Aside
from sglang_inflight.scheduler.staging.pace import Pace
from sglang_inflight.scheduler.staging.read_buffers import ReadBuffers
from sglang_inflight.scheduler.staging.regular_file import RegularFile, Stream, describe
from sglang_inflight.scheduler.staging.safetensors_file import Place, SafetensorsFile
from sglang_inflight.scheduler.staging.shorten import shorten
from sglang_inflight.scheduler.staging.weights import Weights

# What is read in one go, and small tensors together.
PIECE_BYTES = 16 << 20

F = TypeVar("F", bound=RegularFile)


def read_safetensors(
    paths: list[str], aside: Aside, pace: Pace, *, forgets_pages: bool = False
) -> Weights:
    """The tensors of each file in the order in which they lie there.

    ``forgets_pages`` asks the kernel to keep none of a file in memory that has been read.
    """
    with _opened(paths, SafetensorsFile, aside) as files:
        _refuse_twice((file.name, (place.name for place in file.places)) for file in files)
        batches = [(file, list(file.batches(PIECE_BYTES))) for file in files]
        largest = max((_span(batch) for _, some in batches for batch in some), default=0)
        buffers = ReadBuffers(largest)
        try:
            for file, some in batches:
                for batch in some:
                    content = buffers.take(max(1, _span(batch)))[: _span(batch)]
                    _read(file, content, batch[0].start, aside, pace)
                    for place in batch:
                        yield place.name, place.of(content, batch[0].start)
                    # or the buffer would be in use when the next one is taken
                    del content
                _finish(file, aside, forgets_pages)
        finally:
            buffers.give_back()


def read_pickled(
    paths: list[str], aside: Aside, pace: Pace, *, forgets_pages: bool = False
) -> Weights:
    """Those of files of ``torch.save``, a whole one at a time: their tensors lie in no order."""
    seen: dict[str, str] = {}
    with _opened(paths, RegularFile, aside) as files:
        for file in files:
            tensors = aside.do(partial(_unpickle, file))
            pace.spend(file.size)
            _refuse_twice([(file.name, tensors)], seen)
            for name in list(tensors):
                # out of the dict, which would keep all their memory to the end
                yield name, tensors.pop(name)
            _finish(file, aside, forgets_pages)


@contextmanager
def _opened(paths: list[str], kind: type[F], aside: Aside) -> Iterator[list[F]]:
    files: list[F] = []
    with ExitStack() as stack:
        for path in paths:
            file = aside.do(partial(kind, path, os.path.basename(path)))
            stack.callback(file.close)
            files.append(file)
        yield files
        for file in files:
            aside.do(file.check_unchanged)


def _finish(file: RegularFile, aside: Aside, forgets_pages: bool) -> None:
    # again at the end, with all the others, but sooner is better
    aside.do(file.check_unchanged)
    if forgets_pages:
        aside.do(file.forget_pages)


def _span(batch: list[Place]) -> int:
    return batch[-1].end - batch[0].start


def _read(file: RegularFile, content: torch.Tensor, offset: int, aside: Aside, pace: Pace) -> None:
    """Fill ``content``, a piece at a time, as fast as staging may go."""
    view = content.numpy().data
    done = 0
    while done < len(view):
        piece = view[done : done + PIECE_BYTES]
        read = aside.do(partial(file.read_into, piece, offset + done))
        if not read:
            raise file.was_cut()
        pace.spend(read)
        done += read


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


def _refuse_twice(
    files: Iterable[tuple[str, Iterable[str]]], seen: dict[str, str] | None = None
) -> None:
    """Without an index nothing says which of two tensors of one name is meant."""
    seen = {} if seen is None else seen
    for file, names in files:
        for name in names:
            if (first := seen.setdefault(name, file)) != file:
                raise Refused(f"tensor {shorten(name)!r} is in {first} and in {file}")
