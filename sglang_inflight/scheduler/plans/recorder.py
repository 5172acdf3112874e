"""Records where a model's loader puts each tensor, in a run on tensors without memory.

A copy from an arriving tensor into a weight is a move, by the views of both sides. Torch's
operations that only move data (``cat``, ``clone``, ``index_select`` …) make tensors in between:
each is followed by the addresses of its elements, and a copy from it is as many moves as there are
boxes in them. All else computes. A tensor has no moves if the loader computes with it, reads its
values, or writes its weight in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.plans.moves import (
    CONSTANT,
    Box,
    Move,
    TooMany,
    addresses,
    move,
    moves_of,
    overlap,
)
from sglang_inflight.scheduler.update.checks.dataflow import (
    COMMUNICATION,
    Kind,
    Targets,
    tensors_of,
    without_threads,
    written_arguments,
)
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.storages import memory_key

_aten = torch.ops.aten
_COPY = _aten.copy_.default
_CAST = _aten._to_copy.default
_ITEM = _aten._local_scalar_dense.default
_FILL = _aten.fill_.Scalar
_FILLS = (_FILL, _aten.fill_.Tensor, _aten.zero_.default)
# operations whose result has elements of their arguments, and the arguments that are positions
_MOVES_DATA: dict[Any, tuple[int, ...]] = {
    _CAST: (),
    _aten._unsafe_view.default: (),
    _aten.cat.default: (),
    _aten.clone.default: (),
    _aten.constant_pad_nd.default: (),
    _aten.flip.default: (),
    _aten.gather.default: (2,),
    _aten.index.Tensor: (1,),
    _aten.index_select.default: (2,),
    _aten.repeat.default: (),
    _aten.roll.default: (),
    _aten.select_scatter.default: (),
    _aten.slice_scatter.default: (),
    _aten.stack.default: (),
}
# Python's frames between an operation and the method that it is dispatched to, and one
_FRAMES_OF_DISPATCH = 4
_REINTERPRETED = "the loader views it as another dtype"
# most elements of a tensor in between that are followed, 8 bytes each
_MOST_FOLLOWED = 1 << 27


class Planned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A move into the target ``place``, through other dtypes before that of the target.

    A model may have a hundred thousand. Python's garbage collector sees none of them.
    """

    place: str
    move: Move
    through: tuple[torch.dtype, ...] = ()


class Recorded(NamedTuple):
    """The loader's answers for one checkpoint."""

    # a planned tensor has its moves here; one that the rank has no use for has none
    moves: Mapping[str, tuple[Planned, ...]]
    # why a tensor is not planned
    unplanned: Mapping[str, str]
    # a tensor that the loader takes only together with others -> one name for all of them; None for
    # those that it writes after it has got all tensors
    together: Mapping[str, str | None] = MappingProxyType({})
    # numbers that loading sets in the model, by place: no tensor had a content to make them of
    numbers: Mapping[str, Number] = MappingProxyType({})
    # names of the weights that the loader did not write; None if it did not take all tensors
    unwritten: frozenset[str] | None = None
    # names of the tensors that reach a weight or a derived tensor, or whose values are read
    reached: frozenset[str] = frozenset()
    # names of what the loader writes besides weights, and of what ``refresh_derived`` computes
    derived: frozenset[str] = frozenset()
    refreshed: frozenset[str] = frozenset()


class _Content(NamedTuple):
    """The content of a memory in between."""

    # addresses of its elements, or None if they are computed
    found: torch.Tensor | None
    # dtypes on the way of the elements
    through: tuple[torch.dtype, ...] = ()
    # the received tensors behind it
    names: frozenset[str] = frozenset()
    why: str = ""


@dataclass
class _Target:
    name: str
    kind: Kind
    # in order; no name for constants
    writes: list[tuple[str | None, Planned]] = field(default_factory=list)
    # why there are other writes, and the received tensors behind those
    why: str | None = None
    names: set[str] = field(default_factory=set)

    def names_behind(self) -> set[str]:
        return self.names | {name for name, _ in self.writes if name is not None}

    def refuse_overlaps(self) -> None:
        """Note that two writes of one element differ: then their order counts."""
        # a constant before all tensors is what padding keeps
        first = next((at for at, (name, _) in enumerate(self.writes) if name is not None), 0)
        distinct = dict.fromkeys(self.writes[first:])
        if self.why is None and overlap([planned.move.target for _, planned in distinct]):
            self.why = "several tensors are written to one place"


class _Sets:
    """Sets of tensors that a loader takes together."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._late: set[str] = set()

    def join(self, written: Iterable[str | None], asked: str | None) -> None:
        """Join the tensors ``written`` at once, and the one that the loader has got last."""
        names = {name for name in written if name is not None}
        if not names:
            return
        if asked is None:
            self._late |= names
        first, *others = sorted(names if asked is None else names | {asked})
        for other in others:
            one, another = self._root(first), self._root(other)
            if one != another:
                self._parents[another] = one

    def _root(self, name: str) -> str:
        while (parent := self._parents.get(name)) is not None:
            name = parent
        return name

    def found(self) -> dict[str, str | None]:
        late = {self._root(name) for name in self._late}
        members = self._parents.keys() | {self._root(name) for name in self._parents} | self._late
        roots = {name: self._root(name) for name in members}
        return {name: None if root in late else root for name, root in roots.items()}


class Recorder(TorchDispatchMode):
    """Follows one run of a loader on tensors of the meta device, on the thread of that run."""

    def __init__(self, targets: Targets) -> None:
        """``targets``: all memory that the loader may write, by ``memory_key``."""
        super().__init__()
        self._targets = {key: _Target(t.name, t.kind) for key, t in targets.items()}
        # keeps memory whose key is in use below
        self._storages: dict[int, torch.UntypedStorage] = {}
        # position in ``_names``, and dtypes on the way
        self._received: dict[int, tuple[int, tuple[torch.dtype, ...]]] = {}
        self._between: dict[int, _Content] = {}
        # dtypes of memory; that of a target once a view has another one
        self._dtypes: dict[int, torch.dtype] = {}
        self._names: list[str] = []
        # the tensor that the loader has got last; None after it has got all
        self._asked: str | None = None
        self._together = _Sets()
        # one object for all equal moves
        self._moves: dict[Move, Move] = {}
        self._unplanned: dict[str, str] = {}
        # see ``Recorded``
        self.reached: set[str] = set()
        # names of the written targets, since ``take_written``
        self._written: set[tuple[Kind, str]] = set()
        # offset and name of the tensor that SGLang's own loader is about to copy as a number
        self._number: tuple[int, str] | None = None

    @property
    def current(self) -> str | None:
        """The last tensor that the loader has got."""
        return self._names[-1] if self._names else None

    def take_written(self, kind: Kind) -> frozenset[str]:
        """Return the names of the targets of ``kind`` written since the last call with it."""
        found = {each for each in self._written if each[0] is kind}
        self._written -= found
        return frozenset(name for _, name in found)

    def receive_each(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Follow ``weights``, each contiguous and in a memory of its own, on their way."""
        pairs = iter(weights)
        while True:
            # the making of a tensor is no operation of the loader's
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                if (pair := next(pairs, None)) is None:
                    break
                name, tensor = pair
                self._received[self._keep(tensor)] = len(self._names), ()
            self._names.append(name)
            self._asked = name
            yield without_threads(name, tensor)
            self._forget_unused()
        self._asked = None

    def _keep(self, tensor: torch.Tensor) -> int:
        key = memory_key(tensor)
        self._storages[key] = tensor.untyped_storage()
        self._dtypes[key] = tensor.dtype
        return key

    def _is_reinterpreted(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` views a memory as another dtype, in which no move is."""
        return self._dtypes.get(memory_key(tensor), tensor.dtype) != tensor.dtype

    def _forget_unused(self) -> None:
        for key in [*self._between]:
            if torch._C._storage_Use_Count(key) <= _OURS_ALONE:
                del self._between[key], self._storages[key], self._dtypes[key]

    # ---- operations ----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COMMUNICATION:
            raise RuntimeError(f"it communicates between ranks ({func})")
        if func.is_view:
            viewed: torch.Tensor = args[0]
            if (key := memory_key(viewed)) in self._targets:
                self._dtypes.setdefault(key, viewed.dtype)
            return func(*args, **kwargs)
        if self._number is not None and func is not _FILL:
            self._leave_out({self._number[1]}, "its value is read")
            self._number = None
        if func is _ITEM and (number := self._number_of(args[0])) is not None:
            return number
        written = written_arguments(func)
        read: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        for at, value in (*enumerate(args), *kwargs.items()):
            (into if at in written else read).extend(tensors_of(value))
        self._reach(into, read)
        result = func(*args, **kwargs)
        if func is _COPY:
            self._copy(args[0], args[1])
        elif func in _FILLS:
            self._fill(args[0], read)
        elif into:
            for tensor in into:
                self._compute(tensor, [*read, *into], f"{func}")
        elif func in _MOVES_DATA:
            self._move(func, args, kwargs, result, read)
        else:
            self._follow(f"{func}", result, read)
        return result

    def _reach(self, into: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        """Note what is about to be written, and from which tensors."""
        for target in filter(None, (self._targets.get(memory_key(each)) for each in into)):
            if target.kind is Kind.SERVED:
                raise RuntimeError(f"it writes {target.name!r} where it is being served")
            self._written.add((target.kind, target.name))
            self.reached |= self._names_behind(read)

    def _number_of(self, tensor: torch.Tensor) -> float | None:
        """Return a number for a received element with which SGLang fills a weight, else None.

        SGLang's own loader copies a tensor of one element so. A tensor without memory has no
        number. Other readers get torch's error: they may compute with it, or decide by it.
        """
        found = self._received.get(memory_key(tensor))
        if found is None or found[1] or self._is_reinterpreted(tensor):
            return None
        if not _is_called_by(default_weight_loader.__code__):
            return None
        self._number = int(tensor.storage_offset()), self._names[found[0]]
        self.reached.add(self._names[found[0]])
        return 0.0

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        of = of.expand(to.shape)
        target = self._targets.get(memory_key(to))
        if target is None:
            self._copy_between(to, of)
        elif target.kind is not Kind.FOREIGN and to.numel():
            found = self._received.get(memory_key(of))
            if self._is_reinterpreted(to):
                self._spoil(target, self._names_behind([of]), _REINTERPRETED)
                return
            if found is not None and not self._is_reinterpreted(of):
                number, through = found
                planned = self._planned(target, move(Box.of(of), Box.of(to)), through)
                writes: list[tuple[str | None, Planned]] = [(self._names[number], planned)]
            else:
                writes = [*self._moves_between(target, to, of)]
            target.writes += writes
            self._together.join([name for name, _ in writes], self._asked)

    def _moves_between(
        self, target: _Target, to: torch.Tensor, of: torch.Tensor
    ) -> Iterator[tuple[str | None, Planned]]:
        content = self._content(of)
        if content.found is None:
            self._spoil(target, content.names, content.why)
            return
        try:
            for number, each in moves_of(content.found.contiguous(), Box.of(to)):
                name = None if number is None else self._names[number]
                yield name, self._planned(target, each, content.through)
        except TooMany:
            self._spoil(target, content.names, "the loader mixes its elements")

    def _planned(
        self, target: _Target, found: Move, through: tuple[torch.dtype, ...] = ()
    ) -> Planned:
        # layers are alike
        return Planned(target.name, self._moves.setdefault(found, found), through)

    def _copy_between(self, to: torch.Tensor, of: torch.Tensor) -> None:
        before, content = self._memory(to), self._content(of)
        names = before.names | content.names
        if not names:
            return
        if memory_key(to) in self._received:
            self._leave_out(names, "the loader writes into it")
            return
        through = {each.through for each in (before, content) if each.names}
        if before.found is None or content.found is None or len(through) > 1:
            why = before.why or content.why or "its parts have several dtypes"
            self._put(to, _Content(None, names=names, why=why))
            return
        if to.dtype != of.dtype and before.names:
            self._put(to, _Content(None, names=names, why="its parts have several dtypes"))
            return
        casts = (to.dtype,) if to.dtype != of.dtype else ()
        # nobody else has this content
        Box.of(to).view(before.found).copy_(content.found)
        self._put(to, _Content(before.found, (*next(iter(through)), *casts), names))

    def _fill(self, to: torch.Tensor, read: list[torch.Tensor]) -> None:
        number, self._number = self._number, None
        target = self._targets.get(memory_key(to))
        if self._names_behind(read):
            self._compute(to, read, "a fill by a tensor")
        elif target is None and number is not None:
            self._leave_out({number[1]}, "its value is read")
        elif target is None:
            self._copy_between(to, torch.empty((), dtype=to.dtype).expand(to.shape))
        elif self._is_reinterpreted(to):
            self._spoil(target, () if number is None else (number[1],), _REINTERPRETED)
        elif target.kind is not Kind.FOREIGN and to.numel():
            offset, name = (0, None) if number is None else number
            box = Box(offset, tuple(to.shape), (0,) * to.dim())
            target.writes.append((name, self._planned(target, move(box, Box.of(to)))))
            self._together.join([name], self._asked)

    def _move(
        self, func: Any, args: Any, kwargs: Any, result: torch.Tensor, read: list[torch.Tensor]
    ) -> None:
        if memory_key(result) in {memory_key(tensor) for tensor in read}:
            return
        names = frozenset(self._names_behind(read))
        if not names:
            return
        if func is _CAST and self._is_like_received(args[0], result):
            number, through = self._received[memory_key(args[0])]
            cast = () if result.dtype == args[0].dtype else (result.dtype,)
            self._received[self._keep(result)] = number, (*through, *cast)
            return
        positions = [p for at in _MOVES_DATA[func] for p in tensors_of(args[at])]
        if any(tensor.is_meta for tensor in positions):
            self._follow(f"{func}", result, read)
            return
        moved = [each for each in read if not any(each is other for other in positions)]
        contents = {id(tensor): self._content(tensor) for tensor in moved}
        ways = {content.through for content in contents.values() if content.names}
        casts = {tensor.dtype for tensor in moved} - {result.dtype}
        why = next((each.why for each in contents.values() if each.found is None), None)
        if why is not None or len(ways) > 1 or (casts and func is not _CAST):
            self._follow(why or f"{func} of several dtypes", result, read)
            return
        args = _with_addresses(args, {key: content.found for key, content in contents.items()})
        if func is _CAST:
            found = args[0]
        elif func is _aten.constant_pad_nd.default:
            found = func(*args[:2], CONSTANT)
        else:
            found = func(*args, **kwargs)
        flat = _constants(result.untyped_storage().nbytes() // result.itemsize)
        Box.of(result).view(flat).copy_(found)
        self._put(result, _Content(flat, (*next(iter(ways)), *casts), names))

    def _is_like_received(self, tensor: torch.Tensor, result: torch.Tensor) -> bool:
        """Return whether ``result`` has the elements of all of a received tensor, in its order."""
        key = memory_key(tensor)
        if key not in self._received or self._is_reinterpreted(tensor):
            return False
        is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        return is_whole and tensor.is_contiguous() and result.is_contiguous()

    def _follow(self, why: str, result: Any, read: list[torch.Tensor]) -> None:
        names = self._names_behind(read)
        inputs = {memory_key(tensor) for tensor in read}
        made = [*tensors_of(result)]
        if not made:
            self.reached |= names
            self._leave_out(names, f"its values are read by {why}")
        for tensor in made:
            if names and memory_key(tensor) not in inputs:
                self._put(tensor, _Content(None, names=frozenset(names), why=why))

    # ---- contents ------------------------------------------------------------------------

    def _content(self, view: torch.Tensor) -> _Content:
        """Return the content of ``view``: ``found`` has its shape."""
        if self._is_reinterpreted(view):
            return self._reinterpreted(view)
        if (found := self._received.get(memory_key(view))) is not None:
            number, through = found
            names = frozenset({self._names[number]})
            if view.numel() > _MOST_FOLLOWED:
                return _Content(None, names=names, why="the loader uses too large a part at once")
            return _Content(addresses(number, Box.of(view)), through, names)
        content = self._memory(view)
        if content.found is None:
            return content
        return content._replace(found=Box.of(view).view(content.found))

    def _memory(self, tensor: torch.Tensor) -> _Content:
        """Return the content of the memory of ``tensor``: ``found`` is flat."""
        if self._is_reinterpreted(tensor):
            return self._reinterpreted(tensor)
        key = memory_key(tensor)
        if (content := self._between.get(key)) is not None:
            return content
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize
        if (found := self._received.get(key)) is not None:
            return _Content(None, names=frozenset({self._names[found[0]]}))
        target = self._targets.get(key)
        names = frozenset() if target is None else frozenset(target.names_behind())
        if numel > _MOST_FOLLOWED:
            return _Content(None, names=names, why="the loader uses too large a part at once")
        flat = _constants(numel)
        if target is None or not names:
            return _Content(flat)
        through = {planned.through for name, planned in target.writes if name is not None}
        if target.why is not None or len(through) > 1:
            return _Content(None, names=names, why=target.why or "its parts have several dtypes")
        numbers = {name: number for number, name in enumerate(self._names) if name in names}
        for name, planned in target.writes:
            to = planned.move.target.view(flat)
            if name is None:
                to.fill_(CONSTANT)
            else:
                to.copy_(addresses(numbers[name], planned.move.source))
        return _Content(flat, (*next(iter(through)), tensor.dtype), names)

    def _reinterpreted(self, tensor: torch.Tensor) -> _Content:
        names = frozenset(self._names_behind([tensor]))
        return _Content(None, names=names, why=_REINTERPRETED)

    def _put(self, tensor: torch.Tensor, content: _Content) -> None:
        self._between[self._keep(tensor)] = content

    def note_kept(self, tensor: torch.Tensor, why: str) -> None:
        """Note that the model keeps ``tensor`` after loading, for ``why``, beside the targets."""
        if memory_key(tensor) not in self._targets:
            self._leave_out(self._names_behind([tensor]), why)

    def spoil(self, memory: torch.Tensor, why: str) -> None:
        """Note that the target in ``memory`` has another content than by moves, for ``why``."""
        target = self._targets[memory_key(memory)]
        self._spoil(target, (), why)

    # ---- what is computed ------------------------------------------------------------------

    def _compute(self, to: torch.Tensor, read: Iterable[torch.Tensor], why: str) -> None:
        names = self._names_behind(read)
        key = memory_key(to)
        if (target := self._targets.get(key)) is not None:
            if target.kind is not Kind.FOREIGN:
                self._spoil(target, names, why)
        elif key in self._received:
            self._leave_out(names, "the loader writes into it")
        elif names:
            self._put(to, _Content(None, names=frozenset(names), why=why))

    def _names_behind(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        names: set[str] = set()
        for tensor in tensors:
            key = memory_key(tensor)
            if (found := self._received.get(key)) is not None:
                names.add(self._names[found[0]])
            elif (content := self._between.get(key)) is not None:
                names |= content.names
            elif (target := self._targets.get(key)) is not None:
                names |= target.names_behind()
        return names

    def _spoil(self, target: _Target, names: Iterable[str], why: str) -> None:
        target.why = target.why or why
        target.names |= set(names)
        if self._asked is not None:
            # without this tensor the loader would not compute here
            target.names.add(self._asked)

    def _leave_out(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._unplanned.setdefault(name, why)

    # ---- the result --------------------------------------------------------------------------

    def result(self) -> Recorded:
        """Return what was recorded, after the loader's return.

        A target is written by moves alone, or by the loader: with all tensors that write it.
        """
        targets = self._targets.values()
        for target in targets:
            target.refuse_overlaps()
        computed: set[str] = set()
        while found := [
            (target, why)
            for target in targets
            if target.name not in computed and (why := self._why_computed(target)) is not None
        ]:
            for target, why in found:
                computed.add(target.name)
                self._leave_out(target.names_behind(), why)
        moves: dict[str, tuple[Planned, ...]] = {
            name: () for name in self._names if name not in self._unplanned
        }
        for target in targets:
            for name, planned in dict.fromkeys(target.writes):
                if name in moves:
                    moves[name] += (planned,)
        return Recorded(
            moves,
            dict(self._unplanned),
            self._together.found(),
            reached=frozenset(self.reached),
        )

    def _why_computed(self, target: _Target) -> str | None:
        if target.why is not None:
            return target.why
        names = target.names_behind() & self._unplanned.keys()
        return None if not names else self._unplanned[min(names)]


def _constants(numel: int) -> torch.Tensor:
    return torch.full((numel,), CONSTANT, dtype=torch.int64)


def _with_addresses(value: Any, found: Mapping[int, torch.Tensor | None]) -> Any:
    """Return the argument ``value`` with addresses in place of the tensors in ``found``, by id."""
    if isinstance(value, torch.Tensor):
        return found.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_with_addresses(item, found) for item in value)
    return value


def _is_called_by(code: CodeType) -> bool:
    """Return whether ``code`` asked for the operation that a dispatch mode is about to make."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES_OF_DISPATCH):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _count_users_of_kept_memory() -> int:
    """Return how many references a storage has that only a ``Recorder`` keeps."""
    kept = torch.empty(1, device="meta").untyped_storage()
    return torch._C._storage_Use_Count(kept._cdata)


_OURS_ALONE = _count_users_of_kept_memory()
