"""The table of memory states, and every order of events."""

from __future__ import annotations

import itertools
import re

import pytest

from sglang_inflight.extensions.memory import machine
from sglang_inflight.extensions.memory.machine import (
    GRAPHS,
    KINDS,
    KV_CACHE,
    MOVES,
    PRESENT,
    WEIGHTS,
    Event,
    Memory,
    Where,
    move,
    released,
)


def test_docstrings_table_matches_machine() -> None:
    assert machine.__doc__ is not None
    rows = re.findall(r"^    (\w+) +(\w+) +(\w+) +(\w+)$", machine.__doc__, re.MULTILINE)
    assert rows[0] == ("event", *(where.name for where in Where))
    table = {
        (Event(row), where): Where[cell]
        for row, *cells in rows[1:]
        for where, cell in zip(Where, cells, strict=True)
        if cell != "refused"
    }
    assert table == MOVES


def after(*events: Event) -> Where | None:
    memory: Memory | None = PRESENT
    for event in events:
        assert memory is not None
        memory = move(memory, {WEIGHTS: event})
    return None if memory is None else memory[WEIGHTS]


def test_memory_is_released_from_a_release_until_its_resume() -> None:
    for events in itertools.product(Event, repeat=6):
        memory: Memory | None = PRESENT
        is_away = False
        for event in events:
            assert memory is not None
            before, memory = memory, move(memory, {WEIGHTS: event})
            if memory is None:
                # refused: a resume of present memory, or a release of absent memory
                assert (event is Event.RESUME) != is_away
                assert released(before) == ([WEIGHTS] if is_away else [])
                break
            is_away = event is not Event.RESUME
            assert released(memory) == ([WEIGHTS] if is_away else [])
            assert (memory[WEIGHTS] is Where.LOST) == (event is Event.DISCARD)


@pytest.mark.parametrize(
    ("events", "where"),
    [
        ((Event.KEEP,), Where.AWAY),
        ((Event.KEEP, Event.RESUME), Where.PRESENT),
        ((Event.DISCARD, Event.RESUME), Where.PRESENT),
        ((Event.DISCARD, Event.RESUME, Event.DISCARD), Where.LOST),
        ((Event.KEEP, Event.KEEP), None),
        ((Event.DISCARD, Event.KEEP), None),
        ((Event.RESUME,), None),
    ],
)
def test_event_order_ends_in_expected_state(events: tuple[Event, ...], where: Where | None) -> None:
    assert after(*events) is where


def test_memory_kinds_move_together_or_not() -> None:
    kv_away = move(PRESENT, {KV_CACHE: Event.KEEP})
    assert kv_away is not None
    assert released(kv_away) == [KV_CACHE]
    assert move(kv_away, dict.fromkeys(KINDS, Event.KEEP)) is None
    rest_away = move(kv_away, dict.fromkeys((WEIGHTS, GRAPHS), Event.KEEP))
    assert rest_away is not None
    assert set(released(rest_away)) == set(KINDS)
    assert released(PRESENT) == []
