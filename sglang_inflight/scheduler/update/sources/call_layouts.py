"""The layouts of a call's tensors on a rank: read from the call, or kept from an earlier one.

A source that sends mere bytes sends the layouts beside them: names, dtypes and shapes.

A kept bucket needs no Python for a tensor that a load plan moves. Receive buffers are not kept:
memory beside the weights is for KV, and torch gives a freed buffer to the next bucket anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch

from sglang_inflight.messages import LaidOut
from sglang_inflight.scheduler.update.rate import paced, yield_gil
from sglang_inflight.scheduler.update.sources.stretch import (
    Stretch,
    Take,
    rest_of,
    take_none,
)
from sglang_inflight.vocabulary.errors import Refused

_lines = msgspec.json.Decoder(tuple[str, str, tuple[int, ...]])


@dataclass(frozen=True)
class Layout:
    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BucketLayout:
    """The tensors of one bucket, side by side. Read-only, so threads may share it."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        """Raises ``ValueError`` if a tensor would begin within an element."""
        self._stretches: list[Stretch] = []
        known: set[tuple[int, ...]] = set()
        end = 0
        for layout in paced(layouts):
            if end % layout.dtype.itemsize:
                raise ValueError(f"{layout.name} would begin at byte {end}, amid a {layout.dtype}")
            nbytes, shape = layout.nbytes, tuple(layout.shape)
            if shape not in known:
                _require_tensor(shape)
                known.add(shape)
            last = self._stretches[-1] if self._stretches else None
            # a tensor begins at an element of its stretch, too
            if last is None or not last.has_room_for(nbytes) or last.nbytes % layout.dtype.itemsize:
                last = Stretch.begin()
                self._stretches.append(last)
            last.add(layout.name, layout.dtype, shape, nbytes)
            end += nbytes
        self.nbytes = end

    def rows(self, flat: torch.Tensor) -> Iterator[tuple[Stretch, torch.Tensor]]:
        """Yield each stretch with its row in ``flat``, which has ``nbytes`` bytes."""
        start = 0
        for stretch in self._stretches:
            yield stretch, flat[start : start + stretch.nbytes]
            start += stretch.nbytes
            yield_gil()

    def named(
        self, flat: torch.Tensor, take: Take = take_none
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in ``flat`` that ``take`` leaves over."""
        for stretch, row in self.rows(flat):
            yield from rest_of(stretch, row, take)


def _require_tensor(shape: tuple[int, ...]) -> None:
    """Raise ``Refused`` for a shape of which torch makes no tensor."""
    try:
        torch.empty((), dtype=torch.uint8).expand(shape).numel()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise Refused(f"shapes holds {[*shape]}: torch makes no such tensor") from error


@dataclass
class CallLayout:
    """Layouts of a call's tensors, in their order. Read-only.

    A kept layout has no list and no object for each tensor: Python's collector would visit them.
    """

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]
    # made at its first use; or why the tensors make none
    _bucket: BucketLayout | str | None = None

    @classmethod
    def read(
        cls, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> CallLayout:
        """Raises ``Refused`` if the arguments describe no tensors."""
        if not len(names) == len(dtypes) == len(shapes):
            raise Refused(
                f"names, dtypes and shapes must be of one length, not {len(names)}, "
                f"{len(dtypes)} and {len(shapes)}"
            )
        if any(size < 0 for shape in paced(shapes) for size in shape):
            raise Refused("shapes holds a negative size")
        return cls(names, [_dtype(dtype) for dtype in paced(dtypes)], shapes)

    def tensors(self) -> Iterator[Layout]:
        return map(Layout, self.names, self.dtypes, self.shapes)

    @property
    def bucket(self) -> BucketLayout:
        """One bucket of all tensors. Raises ``ValueError`` if a tensor would be unaligned."""
        # no ``cached_property``: Python 3.11 locks it for all threads and objects
        if self._bucket is None:
            try:
                self._bucket = BucketLayout(self.tensors())
            except ValueError as error:
                self._bucket = f"{error}"
        if isinstance(self._bucket, str):
            raise ValueError(self._bucket)
        return self._bucket


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"dtypes holds {name!r}, which is not a dtype of torch")
    return dtype


class CallLayouts:
    """The layouts that this rank keeps, by digest, as the front end wants it.

    The scheduler's thread takes in what a call brings, at the call's arrival and before anything
    else: all ranks do so with every call, also with a refused one. So all ranks keep the same. The
    staging thread reads a new layout in the job of its call. The front end sends a mere digest only
    after all ranks have answered that call, so the scheduler's thread finds every layout read.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def take_in(self, source: object) -> None:
        if not isinstance(source, LaidOut) or source.layout_digest is None:
            return
        for digest in source.forgets_layouts:
            self._kept.pop(digest, None)
        if source.layout_parts:
            self._kept[source.layout_digest] = _Kept(source.layout_parts)

    def find(self, source: LaidOut) -> CallLayout:
        """Return the layout of ``source``.

        Raises ``Refused`` if it describes no tensors, and for a digest that is not kept: its update
        was dropped meanwhile.
        """
        if source.layout_digest is None and source.layout_parts:
            return _read_parts(source.layout_parts)
        if source.layout_digest is None:
            return CallLayout.read(source.names, source.dtypes, source.shapes)
        kept = self._kept.get(source.layout_digest)
        if kept is None:
            raise Refused(f"the layout {source.layout_digest} is not kept any more")
        return kept.layout


class _Kept:
    """A layout, to be read by the staging thread."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self._layout: CallLayout | None = None

    @property
    def layout(self) -> CallLayout:
        """The layout and its bucket, read once."""
        if self._layout is None:
            layout = _read_parts(self._parts)
            # not each layout is a bucket's
            with suppress(ValueError):
                _ = layout.bucket
            self._layout, self._parts = layout, []
        return self._layout


def _read_parts(parts: list[bytes]) -> CallLayout:
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    # equal ones share memory
    dtype_of: dict[str, str] = {}
    shape_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part in parts:
        for name, dtype, shape in _lines.decode_lines(part):
            names.append(name)
            dtypes.append(dtype_of.setdefault(dtype, dtype))
            shapes.append(shape_of.setdefault(shape, shape))
        yield_gil()
    return CallLayout.read(names, dtypes, shapes)
