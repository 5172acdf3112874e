"""Follows memory through a model's forward: is a tensor made of weights, or of a request?

A forward may keep a tensor for later forwards. A tensor made of weights alone is outdated by the
next commit. A tensor in which a request takes part is a workspace, and no commit concerns it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.checks.dataflow import (
    OVERWRITES,
    tensors_of,
    written_arguments,
)
from sglang_inflight.storages import memory_key


class Origin(enum.Flag):
    """The kinds of data that a tensor was computed from. Constants have none."""

    CONSTANTS = 0
    WEIGHTS = enum.auto()
    REQUEST = enum.auto()
    # memory that no watched operation wrote
    UNKNOWN = enum.auto()

    @property
    def is_of_weights(self) -> bool:
        """Whether the next weights would make this tensor anew."""
        return Origin.WEIGHTS in self and Origin.REQUEST not in self


# these read shapes and dtypes of their arguments, and no elements
_ALLOCATES = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_FILLS = frozenset(
    f"aten::{name}{suffix}" for name in ("zeros", "ones", "full") for suffix in ("", "_like")
) | {f"aten::new_{name}" for name in ("zeros", "ones", "full")}


class Provenance(TorchDispatchMode):
    """Notes the origin of each storage that torch operations write, on this thread.

    The mode runs each operation as it is, and changes no result. It raises nothing of its own:
    ``failure`` is the first error of the bookkeeping, and nothing is noted after it.

    Kernels outside of torch's dispatcher (Triton) are not seen. A tensor from ``torch.empty`` is of
    unknown origin until a watched operation writes all of it. A tensor that torch filled with one
    number is of unknown origin if it holds others later. Compiled functions stay compiled: with
    any other mode torch refuses to run some of them.
    """

    # operations that take functions, which are no operations of a schema
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        constants: Iterable[torch.Tensor],
        request: Iterable[torch.Tensor],
    ) -> None:
        """The arguments are the tensors known before the forward."""
        super().__init__()
        self._origins: dict[int, Origin] = {}
        # a storage's key is not given to another one while a weak reference lives
        self._storages: dict[int, StorageWeakRef] = {}
        self._filled: set[int] = set()
        self._known_before: set[int] = set()
        # origins of what was written to a weight, or to a constant, by ``memory_key``
        self.written: dict[int, Origin] = {}
        self.reads_numbers = False
        self.failure: Exception | None = None
        origins = (
            (request, Origin.REQUEST),
            (constants, Origin.CONSTANTS),
            (weights, Origin.WEIGHTS),
        )
        for tensors, origin in origins:
            for tensor in tensors:
                self._note(tensor, origin)
                if origin is not Origin.REQUEST:
                    self._known_before.add(memory_key(tensor))

    def origin_of(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of ``tensor``, from outside of the watched forward."""
        origin = self._origin(tensor)
        if origin is Origin.CONSTANTS and memory_key(tensor) in self._filled and tensor.numel():
            is_as_filled = bool((tensor == tensor.flatten()[0]).all())
            return origin if is_as_filled else Origin.UNKNOWN
        return origin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.failure is None:
            try:
                if not isinstance(func, torch._ops.OpOverload):
                    self._note_results(result, Origin.UNKNOWN)
                elif not func.is_view:
                    self._follow(func, args, kwargs, result)
            except Exception as error:
                self.failure = error
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        written_at = written_arguments(func)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for at, value in (*enumerate(args), *kwargs.items()):
            (written if at in written_at else read).extend(tensors_of(value))
        name = func._schema.name
        origin = Origin.CONSTANTS
        if name in _ALLOCATES or (func.namespace != "aten" and not read):
            # a collective's receive reads nothing of this process
            origin = Origin.UNKNOWN
        elif name not in _FILLS:
            for tensor in read:
                origin |= self._origin(tensor)
        overwrites = name in OVERWRITES or "out" in func._overloadname
        for tensor in written:
            self._write(tensor, origin, overwrites=overwrites)
        results = list(tensors_of(result))
        if not results and read and origin.is_of_weights:
            self.reads_numbers = True
        inputs = {memory_key(tensor) for tensor in (*written, *read)}
        for tensor in results:
            key = memory_key(tensor)
            if key not in inputs:
                self._note(tensor, origin)
                if name in _FILLS:
                    self._filled.add(key)

    def _note_results(self, result: Any, origin: Origin) -> None:
        for tensor in tensors_of(result):
            self._note(tensor, origin)

    def _write(self, tensor: torch.Tensor, origin: Origin, *, overwrites: bool) -> None:
        key = memory_key(tensor)
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        if not (overwrites and is_whole):
            origin |= self._origin(tensor)
        if key in self._known_before:
            self.written[key] = self.written.get(key, Origin.CONSTANTS) | origin
        self._note(tensor, origin)

    def _origin(self, tensor: torch.Tensor) -> Origin:
        return self._origins.get(memory_key(tensor), Origin.UNKNOWN)

    def _note(self, tensor: torch.Tensor, origin: Origin) -> None:
        key = memory_key(tensor)
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())
        self._origins[key] = origin
