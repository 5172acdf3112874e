"""Where each kind of memory is, and what a call makes of it. Data; no scheduler and no device.

    event     PRESENT   AWAY      LOST      HOLLOW
    keep      AWAY      refused   refused   LOST
    discard   LOST      refused   refused   LOST
    resume    refused   PRESENT   HOLLOW    refused
    filled    PRESENT   refused   refused   PRESENT
    overwrite HOLLOW    refused   refused   HOLLOW

PRESENT: as it was loaded, or last committed. AWAY: its memory is given back, and it will be as
it was. LOST: its memory is given back, and its contents are gone. HOLLOW: its memory is here,
and nobody knows what is in it. Only weights can be lost: of the KV cache and of CUDA graphs
nothing is missed, because whoever may release the first has no request that needs it, and the
second keep what they hold.

A call moves all kinds that it names, or none. Every rank has the same table and gives it the
same events in the same order, but for ``filled``, whose outcome all ranks vote for.
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
# in the order in which they come back, as upstream has it
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


# what is not in it is refused
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
    """After ``events``, by kind of memory; None where one of them is refused."""
    moved = dict(memory)
    for kind, event in events.items():
        after = MOVES.get((event, memory[kind]))
        if after is None:
            return None
        moved[kind] = after
    return moved


def released(memory: Memory, kinds: Iterable[str] = KINDS) -> list[str]:
    """Those of ``kinds`` that nothing may touch."""
    return [kind for kind in kinds if memory[kind] in (Where.AWAY, Where.LOST)]
