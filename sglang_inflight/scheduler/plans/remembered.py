"""Plans that an earlier server with the same model has proven, in files of the cache folder.

The name of a file has all that a plan and its proof depend on (``finished/remembered.py``). A file
that cannot be read or written costs the time of a record and a proof, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from sglang_inflight.cache import default_cache, keep, read_kept
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.rate import yield_gil

# counted up when a file says something else, or a plan is found by other rules
_FORMAT = 3
# tensors decoded in one go: a call holds the interpreter
_AT_ONCE = 512

T = TypeVar("T")


class _Entry(NamedTuple):
    """One tensor of a plan: it has moves, or a reason to go by the loader."""

    name: str
    kind: Kind
    moves: tuple[Planned, ...] = ()
    by_loader: str | None = None
    # one name for all tensors that the loader takes together, None if it takes them at the end
    unit: str | None = ""


class _Kept(NamedTuple):
    """A plan in a file. ``parts`` are lists of ``_Entry``."""

    numbers: dict[str, Number]
    parts: list[msgspec.Raw]


def recall(name: str) -> Plan | None:
    """Return the plan of this name, or None if there is none."""
    return read_kept(_file(name), "plan", _decode)


def _decode(content: bytes) -> Plan:
    # layers are alike: one object for all equal ones
    shared: dict[Any, Any] = {}
    kept = msgspec.msgpack.decode(content, type=_Kept)
    plan = Plan({}, {}, {}, {}, kept.numbers)
    for part in kept.parts:
        for entry in _decoder.decode(part):
            plan.kinds[entry.name] = shared.setdefault(entry.kind, entry.kind)
            if entry.unit != "":
                plan.together[entry.name] = entry.unit
            if entry.by_loader is None:
                plan.moves[entry.name] = tuple(
                    Planned(
                        shared.setdefault(each.place, each.place),
                        shared.setdefault(each.move, each.move),
                        each.through,
                    )
                    for each in entry.moves
                )
            else:
                plan.by_loader[entry.name] = entry.by_loader
        yield_gil()
    return plan.indexed()


def remember(name: str, plan: Plan) -> None:
    """Keep ``plan`` under ``name``, whole or not at all."""
    entries = (
        _Entry(
            name,
            kind,
            plan.moves.get(name, ()),
            plan.by_loader.get(name),
            plan.together.get(name, ""),
        )
        for name, kind in plan.kinds.items()
    )
    parts = []
    for part in _parts(entries):
        parts.append(msgspec.Raw(msgspec.msgpack.encode(part, enc_hook=_dtype_name)))
        yield_gil()
    keep(_file(name), msgspec.msgpack.encode(_Kept(plan.numbers, parts)), "plan")


def _parts(entries: Iterator[T]) -> Iterator[list[T]]:
    while part := [*islice(entries, _AT_ONCE)]:
        yield part


def _dtype_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _dtype(kind: type, name: Any) -> Any:
    return getattr(torch, name)


_decoder = msgspec.msgpack.Decoder(list[_Entry], dec_hook=_dtype)


def _file(name: str) -> Path:
    return default_cache() / "plans" / f"{name}.{_FORMAT}"
