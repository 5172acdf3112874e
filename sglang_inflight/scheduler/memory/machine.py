"""The memory machine: states of each kind of memory. Pure data, with no scheduler or device.

    event     PRESENT   AWAY      LOST      HOLLOW
    keep      AWAY      refused   refused   LOST
    discard   LOST      refused   refused   LOST
    resume    refused   PRESENT   HOLLOW    refused
    filled    PRESENT   refused   refused   PRESENT
    overwrite HOLLOW    refused   refused   HOLLOW

PRESENT: as loaded, or as last committed. AWAY: its memory is released, and its contents will come
back. LOST: its memory is released, and its contents are gone. HOLLOW: its memory is here, with
unknown contents. Only weights can be lost. A KV cache is released only when no request needs it,
and CUDA graphs keep their contents.

A call moves all kinds of memory in it, or none. Every rank has the same table, and gives it the
same events in the same order. The outcome of ``filled`` may differ, so all ranks vote for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from sglang.srt.constants import (
    GPU_MEMORY_TYPE_CUDA_GRAPH,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
)

WEIGHTS, KV_CACHE, GRAPHS = (
    GPU_MEMORY_TYPE_WEIGHTS,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_CUDA_GRAPH,
)
# in the order of their resume, as in SGLang
KINDS: tuple[str, ...] = (GRAPHS, WEIGHTS, KV_CACHE)


class Where(enum.Enum):
    PRESENT = "present"
    AWAY = "away"
    LOST = "lost"
    HOLLOW = "hollow"


class Event(enum.Enum):
    KEEP = "keep"
    DISCARD = "discard"
    RESUME = "resume"
    FILLED = "filled"
    OVERWRITE = "overwrite"


# a missing key is a refusal
MOVES: dict[tuple[Event, Where], Where] = {
    (Event.KEEP, Where.PRESENT): Where.AWAY,
    (Event.KEEP, Where.HOLLOW): Where.LOST,
    (Event.DISCARD, Where.PRESENT): Where.LOST,
    (Event.DISCARD, Where.HOLLOW): Where.LOST,
    (Event.RESUME, Where.AWAY): Where.PRESENT,
    (Event.RESUME, Where.LOST): Where.HOLLOW,
    (Event.FILLED, Where.PRESENT): Where.PRESENT,
    (Event.FILLED, Where.HOLLOW): Where.PRESENT,
    (Event.OVERWRITE, Where.PRESENT): Where.HOLLOW,
    (Event.OVERWRITE, Where.HOLLOW): Where.HOLLOW,
}

Memory = Mapping[str, Where]

PRESENT: Memory = dict.fromkeys(KINDS, Where.PRESENT)


def move(memory: Memory, events: Mapping[str, Event]) -> Memory | None:
    """Return ``memory`` after ``events``, by kind of memory, or None if one is refused."""
    moved = dict(memory)
    for kind, event in events.items():
        after = MOVES.get((event, memory[kind]))
        if after is None:
            return None
        moved[kind] = after
    return moved


def released(memory: Memory, kinds: Iterable[str] = KINDS) -> list[str]:
    """Return the released kinds among ``kinds``. No code may touch them."""
    return [kind for kind in kinds if memory[kind] in (Where.AWAY, Where.LOST)]
