"""Follows tensors through a model's loader, to the memory read by the next forward.

A loader decides about a tensor: copy it, fuse it with another one, hold it until that one comes,
compute with it, or ignore it. A loader may also write past its parameters. Neither names nor the
number of calls to ``weight_loader`` show any of this. So each torch operation on the loader's
thread is watched: the memory it reads, and the memory it writes.
"""

from __future__ import annotations

import enum
import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.rate import RateLimit, copy_in_pieces
from sglang_inflight.storages import memory_key, range_of
from sglang_inflight.vocabulary.errors import Refused

COMMUNICATION = ("c10d", "_c10d_functional")
_COPY = torch.ops.aten.copy_.default
_FILL = torch.ops.aten.fill_.Scalar
_ITEM = torch.ops.aten._local_scalar_dense.default
# these write every element of their first argument, and read none of its elements
OVERWRITES = frozenset(
    f"aten::{name}" for name in ("copy_", "fill_", "zero_", "uniform_", "normal_")
)
# words in the names of operations that write the elements at some positions
_BY_POSITIONS = ("index", "scatter", "masked", "put_")


class Kind(enum.Enum):
    """The kind of a target, which decides whether a loader may write it."""

    # a parameter or buffer that a checkpoint may hold
    WEIGHT = enum.auto()
    # a tensor that the model computes from weights, or a table
    DERIVED = enum.auto()
    # a weight that another model of the rank owns: writes are left out
    FOREIGN = enum.auto()
    # memory served while the update is staged: a write is refused
    SERVED = enum.auto()


class Target(NamedTuple):
    kind: Kind
    name: str


class Write(NamedTuple):
    """A loader is about to write ``target``."""

    target: Target
    # identifies the written memory, see ``memory_key``
    memory: int
    # dtypes of the written tensor, and of the received one copied to it, None without one
    dtype: torch.dtype
    copied: torch.dtype | None
    # the received tensors that it is written from
    names: frozenset[str]
    # the written elements, and whether the operation sets each of them
    view: torch.Tensor
    sets_all: bool


Targets = Mapping[int, Target]


class Recorder(Protocol):
    """Takes part in operations on the memory of weights, before each."""

    def read(self, view: torch.Tensor) -> None:
        """Prepare the memory of ``view``: an operation will read it."""

    def copy(self, to: torch.Tensor, of: torch.Tensor, *, is_received: bool) -> bool:
        """Make ``to.copy_(of)`` in the recorder's own way. Return False if torch shall make it.

        ``is_received``: all elements of ``of`` are as received.
        """
        return False

    def write(self, view: torch.Tensor, *, sets_all: bool, reads: bool) -> None:
        """Prepare the memory of ``view``: an operation will write it.

        ``sets_all``: it sets each element of the view. ``reads``: it uses what is there.
        """
        return


class _Received:
    """The tensors received in one storage, by their ranges of bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        start, end = range_of(tensor)
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ranges.insert(at, (end, name))

    def names_in(self, tensor: torch.Tensor) -> Iterator[str]:
        start, end = range_of(tensor)
        # a tensor that begins before ``start`` may reach beyond it
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            if self._ranges[at][0] > start:
                yield self._ranges[at][1]
            at += 1


class Dataflow(TorchDispatchMode):
    """Finds the received tensors that reached a target, and the written targets.

    Torch keeps the mode per thread, so operations of other threads are neither seen nor slowed.
    One object serves one call of a loader, on that call's thread. Writes of kernels outside of
    torch's dispatcher (Triton) are not seen: the memory they wrote is of unknown origin. A weight
    receiving such memory counts for the tensor being loaded, or for all tensors once the loader
    has taken the last one.

    A write to a ``SERVED`` target raises ``Refused`` out of the loader's operation, before the
    operation runs.
    """

    def __init__(
        self,
        targets: Targets,
        *,
        before_write: Callable[[Write], None],
        rate_limit: RateLimit | None = None,
        recorder: Recorder | None = None,
        communicates: bool = False,
    ) -> None:
        """``before_write`` is called before each write to a weight or to derived memory.

        ``communicates``: all ranks do the same between the same two steps, so operations may wait
        for other ranks. Others raise ``Refused``.
        """
        super().__init__()
        self._targets = targets
        self._before_write = before_write
        self._rate_limit = rate_limit
        self._recorder = recorder
        self._communicates = communicates
        # both by ``memory_key``
        self._received: dict[int, _Received] = {}
        self._computed: dict[int, frozenset[str]] = {}
        # the received tensors, and the last one; None after the loader took the last of all
        self._names: set[str] = set()
        self._current: str | None = None
        # tensors of which the loader has taken numbers since it took the last tensor
        self._as_numbers: frozenset[str] = frozenset()
        self.reached: set[str] = set()

    def aim_at(self, targets: Targets, recorder: Recorder | None) -> None:
        """Look for writes to ``targets`` from now on, and let ``recorder`` take part in them."""
        self._targets, self._recorder = targets, recorder

    def receive(self, name: str, tensor: torch.Tensor, *, is_alone: bool) -> None:
        """Follow ``tensor``. ``is_alone``: no other followed tensor lies in its storage."""
        key = memory_key(tensor)
        if is_alone or key not in self._received:
            self._received[key] = _Received()
        self._computed.pop(key, None)
        self._received[key].add(name, tensor)
        self._names.add(name)
        self._current = name
        self._as_numbers = frozenset()

    def receive_no_more(self) -> None:
        """Note the end of the tensors: the loader has taken the last one."""
        self._current = None

    def receive_each(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Follow each tensor of ``weights``, with memory of its own, on its way to a loader."""
        pairs = iter(weights)
        while True:
            with self.untraced():
                if (pair := next(pairs, None)) is None:
                    break
            self.receive(*pair, is_alone=True)
            yield without_threads(*pair)
        self.receive_no_more()

    @staticmethod
    def untraced() -> AbstractContextManager[None]:
        """Return a context for our own operations on the loader's thread: none is watched."""
        return torch._C._DisableTorchDispatch()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COMMUNICATION and not self._communicates:
            raise Refused(
                f"the model's loading or finishing communicates between ranks ({func}), and other "
                "ranks may be in a step: SGLANG_INFLIGHT_STAGING=off updates between two steps"
            )
        if func.is_view:
            # a view has the same storage, and storages are followed
            return func(*args, **kwargs)
        written = written_arguments(func)
        read: list[torch.Tensor] = []
        written_tensors: list[torch.Tensor] = []
        for at, value in (*enumerate(args), *kwargs.items()):
            (written_tensors if at in written else read).extend(tensors_of(value))
        names, is_known = self._origin(read)
        if func in (_COPY, _FILL) and not read:
            # SGLang's loader writes a weight of one element so
            names = self._as_numbers
        is_received = self._is_copy_of_received(func, read)
        if self._recorder is not None:
            in_place = written_tensors if _reads_itself(func) else []
            reads = [t for t in read if self._is_weight(t) and not _reads_shapes(func)]
            reads += [t for t in in_place if self._is(Kind.WEIGHT, t)]
            for tensor in reads:
                self._recorder.read(tensor)
        for tensor in written_tensors:
            target = self._targets.get(memory_key(tensor))
            if target is None:
                continue
            copied = read[0].dtype if is_received else None
            self._reach(
                Write(
                    target,
                    memory_key(tensor),
                    tensor.dtype,
                    copied,
                    names,
                    tensor,
                    _sets_all(func),
                ),
                is_known,
            )
            if target.kind is Kind.FOREIGN:
                # an in-place operation returns its first argument
                return args[0]
        if self._is_recorded(func, args, written_tensors, is_received=is_received):
            result = args[0]
        elif func is _COPY and self._rate_limit is not None and written_tensors and read:
            copy_in_pieces(self._rate_limit, args[0], args[1], *args[2:], **kwargs)
            result = args[0]
        else:
            result = func(*args, **kwargs)
        self._follow(func, result, written_tensors, read, names)
        return result

    def _is_recorded(
        self, func: Any, args: Any, written: list[torch.Tensor], *, is_received: bool
    ) -> bool:
        """Return whether the operation is a copy or a fill that the recorder has made."""
        written = [t for t in written if t.numel() and self._is_weight(t)]
        if self._recorder is None or not written:
            return False
        if func in (_COPY, _FILL):
            source = args[1]
            if not isinstance(source, torch.Tensor):
                # SGLang's embeddings fill their padding, and torch copies numbers, too
                source = torch.full((), source, dtype=args[0].dtype, device=args[0].device)
            if self._recorder.copy(args[0], source, is_received=is_received):
                return True
        for tensor in written:
            self._recorder.write(tensor, sets_all=_sets_all(func), reads=_reads_itself(func))
        return False

    def _is_copy_of_received(self, func: Any, read: list[torch.Tensor]) -> bool:
        return func is _COPY and len(read) > 0 and memory_key(read[0]) in self._received

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self._is(Kind.WEIGHT, tensor) or self._is(Kind.FOREIGN, tensor)

    def _is(self, kind: Kind, tensor: torch.Tensor) -> bool:
        target = self._targets.get(memory_key(tensor))
        return target is not None and target.kind is kind

    def _origin(self, tensors: list[torch.Tensor]) -> tuple[frozenset[str], bool]:
        """Return the received tensors behind ``tensors``, and whether all origins are known."""
        names: frozenset[str] = frozenset()
        is_known = True
        for tensor in tensors:
            key = memory_key(tensor)
            if (received := self._received.get(key)) is not None:
                names |= frozenset(received.names_in(tensor))
            elif (computed := self._computed.get(key)) is not None:
                names |= computed
                is_known = is_known and bool(computed)
            else:
                is_known = is_known and key in self._targets
        return names, is_known

    def _reach(self, write: Write, is_known: bool) -> None:
        target = write.target
        if target.kind is Kind.SERVED:
            raise Refused(
                f"the model's loader writes {target.name!r} where it is being served, and not only "
                "its staged copy: SGLANG_INFLIGHT_STAGING=off writes updates in place instead"
            )
        names = write.names
        if target.kind is Kind.WEIGHT and not names and not is_known:
            names = frozenset(self._names if self._current is None else {self._current})
        if target.kind is not Kind.FOREIGN:
            self._before_write(write._replace(names=names))
        self.reached |= names

    def _follow(
        self,
        func: Any,
        result: Any,
        written: list[torch.Tensor],
        read: list[torch.Tensor],
        names: frozenset[str],
    ) -> None:
        for tensor in written:
            key = memory_key(tensor)
            if key not in self._targets and key not in self._received:
                self._computed[key] = self._computed.get(key, frozenset()) | names
        results = list(tensors_of(result))
        if not results and read:
            # a number: no target shows its use, so its tensors count as used
            self.reached |= names
            if func is _ITEM:
                self._as_numbers |= names
            return
        inputs = {memory_key(tensor) for tensor in (*written, *read)}
        for tensor in results:
            key = memory_key(tensor)
            if key not in inputs:
                self._received.pop(key, None)
                self._computed[key] = names


def without_threads(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Mark a tensor so that SGLang's loaders use no threads.

    A thread's copy could come after the vote, on a stream that nothing waits for. By then its
    source could be the memory of the next tensor. SGLang's loaders look for this mark.
    """
    tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
    return name, tensor


@functools.cache
def _sets_all(func: Any) -> bool:
    """Return whether an operation sets each element of what it writes."""
    name: str = func._schema.name
    return func.namespace == "aten" and not any(word in name for word in _BY_POSITIONS)


@functools.cache
def _reads_itself(func: Any) -> bool:
    """Return whether an operation computes each element that it writes from that element."""
    sets_anew = func._schema.name in OVERWRITES or "out" in func._overloadname
    return _sets_all(func) and not sets_anew


@functools.cache
def _reads_shapes(func: Any) -> bool:
    """Return whether an operation reads shapes and dtypes of its arguments alone."""
    name: str = func._schema.name
    return func.namespace == "aten" and (name.endswith("_like") or name.startswith("aten::new_"))


@functools.cache
def written_arguments(func: Any) -> frozenset[int | str]:
    """Return positions and names of the arguments written by a torch operation."""
    found: set[int | str] = set()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {at, argument.name}
    return frozenset(found)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory in an argument, or a result, of a torch operation."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
