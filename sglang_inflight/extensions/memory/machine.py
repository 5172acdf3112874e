"""The memory machine: states of each kind of memory. Pure data, with no scheduler or device.

    event     PRESENT   AWAY      LOST
    keep      AWAY      refused   refused
    discard   LOST      refused   refused
    resume    refused   PRESENT   PRESENT

AWAY: its memory is released, and its contents will come back. LOST: its memory is released, and its
contents are gone. Only weights can be lost, and they come back hollow (``update/live_machine.py``).
A KV cache is released only when no request needs it, and CUDA graphs keep their contents.

A call moves all kinds of memory in it, or none. Every rank has the same table, and gives it the
same events in the same order.
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
# kinds in the order of their resume, as in SGLang
KINDS: tuple[str, ...] = (GRAPHS, WEIGHTS, KV_CACHE)


class Where(enum.Enum):
    PRESENT = "present"
    AWAY = "away"
    LOST = "lost"


class Event(enum.Enum):
    KEEP = "keep"
    DISCARD = "discard"
    RESUME = "resume"


# a missing key is a refusal
MOVES: dict[tuple[Event, Where], Where] = {
    (Event.KEEP, Where.PRESENT): Where.AWAY,
    (Event.DISCARD, Where.PRESENT): Where.LOST,
    (Event.RESUME, Where.AWAY): Where.PRESENT,
    (Event.RESUME, Where.LOST): Where.PRESENT,
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
