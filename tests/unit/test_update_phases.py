"""Outcomes of an update, in every order of events and calls."""

from __future__ import annotations

import itertools
import re

import pytest

from sglang_inflight.frontend.updates import open_update as phases
from sglang_inflight.frontend.updates.open_update import TABLE, Event, Phase, follow

LENGTH = 4


def run(events: tuple[Event, ...]) -> list[Phase]:
    """Return all phases, including the first. An impossible event changes nothing."""
    passed = [Phase.OPEN]
    for event in events:
        passed.append(follow(passed[-1], event) or passed[-1])
    return passed


def test_docstrings_table_matches_phases() -> None:
    rows = re.findall(r"^    ([A-Z]+) +([A-Z]+) +([A-Z]+)(?: |$)", phases.__doc__ or "", re.M)
    described = {(Phase[phase], Event[event]): Phase[then] for phase, event, then in rows}
    assert described == TABLE


def test_update_commits_or_drops_in_every_order() -> None:
    for events in itertools.product(Event, repeat=LENGTH):
        passed = run(events)
        done = [
            event
            for event, before in zip(events, passed, strict=False)
            if follow(before, event) is not None
        ]
        if Phase.COMMITTING in passed:
            # voted for, and nothing was staged after the seal
            assert [e for e in done if e is not Event.STAGE][:3] == [
                Event.SEAL,
                Event.VOTE,
                Event.COMMIT,
            ]
            assert Event.STAGE not in done[done.index(Event.SEAL) :]
        # committed or dropped, never both, and ended once
        assert not {Phase.COMMITTING, Phase.DROPPED} <= set(passed)
        assert done.count(Event.END) + done.count(Event.DROP) <= 1
        assert (Event.DROP in done) == (passed[-1] is Phase.DROPPED)


@pytest.mark.parametrize("phase", Phase)
def test_ended_phase_is_final(phase: Phase) -> None:
    """Every other phase can end."""
    moves = {then for (before, _), then in TABLE.items() if before is phase}
    is_over = phase in (Phase.ENDED, Phase.DROPPED)
    assert bool(moves) is not is_over
    assert is_over or moves & {Phase.ENDED, Phase.DROPPED}
