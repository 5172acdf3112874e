"""The layouts of a call's tensors on a rank: read from the call, or kept from an earlier one.

A source that sends mere bytes sends the layouts beside them: names, dtypes and shapes.

A bucket is cut by one call of torch for many tensors, which takes 1 µs for each, and a kept bucket
needs no other Python for a tensor. Receive buffers and their views are not kept. Memory beside the
weights is for KV, and torch gives a freed buffer to the next bucket anyway. A bucket of large
tensors has few views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import torch

from sglang_inflight.messages import LaidOut
from sglang_inflight.scheduler.update.rate import paced, yield_gil
from sglang_inflight.vocabulary.errors import Refused

# tensors cut by one call of torch, in some 0.2 ms
_CUT = 256

_lines = msgspec.json.Decoder(tuple[str, str, tuple[int, ...]])


@dataclass(frozen=True)
class Layout:
    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Run:
    """Neighbours of one dtype in a bucket: ``names``, and a tensor of each one's shape in ``like``.

    ``start`` and ``end`` are bytes of the bucket.
    """

    dtype: torch.dtype
    start: int
    end: int
    names: list[str] = field(default_factory=list)
    like: list[torch.Tensor] = field(default_factory=list)

    def cut(self, part: torch.Tensor) -> Iterable[torch.Tensor]:
        """Return the tensors in ``part``, the run's bytes."""
        flat = part.view(self.dtype)
        if self.start == self.end:
            return [flat.view(like.shape) for like in self.like]
        tensors: Iterable[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(flat, self.like)
        return tensors


class BucketLayout:
    """The tensors of one bucket, side by side. Read-only, so threads may share it."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        """Raises ``ValueError`` if a tensor would begin within an element."""
        self._runs: list[Run] = []
        like: dict[tuple[int, ...], torch.Tensor] = {}
        end = 0
        for layout in paced(layouts):
            if end % layout.dtype.itemsize:
                raise ValueError(f"{layout.name} would begin at byte {end}, amid a {layout.dtype}")
            nbytes, shape = layout.nbytes, tuple(layout.shape)
            run = self._runs[-1] if self._runs else None
            # torch cuts no empty tensors: they have runs of their own
            if (
                run is None
                or run.dtype is not layout.dtype
                or len(run.names) == _CUT
                or (run.start == run.end) != (nbytes == 0)
            ):
                run = Run(layout.dtype, end, end)
                self._runs.append(run)
            run.names.append(layout.name)
            run.like.append(like[shape] if shape in like else like.setdefault(shape, _like(shape)))
            end += nbytes
            run.end = end
        self.nbytes = end

    def cut(self, flat: torch.Tensor) -> Iterator[tuple[Run, Iterable[torch.Tensor]]]:
        """Yield each run with its tensors in ``flat``, a row of ``nbytes`` bytes."""
        for run in self._runs:
            yield run, run.cut(flat[run.start : run.end])
            yield_gil()

    def named(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for run, tensors in self.cut(flat):
            yield from zip(run.names, tensors, strict=True)


def _like(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this shape, of one element's memory. Raises ``Refused`` for a huge one."""
    try:
        like = torch.empty((), dtype=torch.uint8).expand(shape)
        like.numel()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise Refused(f"shapes holds {[*shape]}: torch makes no such tensor") from error
    return like


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
