"""Looks into the values of attributes: they hold tensors, plain data, or nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from sglang_inflight.scheduler.update.attributes import namespaces_of, tensors_in

PLAIN = (bool, int, float, str, type(None), torch.dtype)
_PLAIN_TYPES = frozenset(PLAIN)
# levels of objects within objects
_DEPTH = 2


def tensors_within(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, its containers, named tuples, records and modules."""
    if isinstance(value, torch.Tensor):
        yield from tensors_in(value)
        return
    if isinstance(value, nn.Module):
        # a container refers to modules of the model, which have slots of their own
        for module in value.modules() if depth == _DEPTH else ():
            for _, namespace in namespaces_of(module):
                yield from tensors_in(tuple(namespace.values()))
        return
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = tuple(value.values())
    elif isinstance(value, msgspec.Struct):
        parts = msgspec.structs.asdict(value).values()
    elif _is_record(value):
        parts = attributes_of_object(value)
    if depth:
        for part in parts:
            # a configuration has a hundred numbers
            if type(part) not in _PLAIN_TYPES:
                yield from tensors_within(part, depth - 1)


def _is_record(value: object) -> bool:
    kind: Any = type(value)
    return _is_dataclass(kind)


@functools.cache
def _is_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind)


def attributes_of_object(value: object) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor | nn.Module | type):
        return ()
    return tuple(getattr(value, "__dict__", {}).values())


def is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (
        isinstance(value, tuple) and all(is_plain(item) for item in value)
    )


def is_container(value: Any) -> bool:
    return type(value) in (list, dict)


def is_empty(value: Any) -> bool:
    return value is None or (type(value) in (list, dict) and not value)


def is_opaque(value: Any) -> bool:
    """Return whether ``tensors_within`` finds nothing in ``value``, now and later."""
    holds = (torch.Tensor, nn.Module, list, tuple, dict, msgspec.Struct, *PLAIN)
    return not isinstance(value, holds) and not _is_record(value)
