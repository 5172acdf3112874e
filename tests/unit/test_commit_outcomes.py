"""Outcome of a commit from its ranks' answers. No error says "unchanged" after a change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.two_phase import TwoPhase
from sglang_inflight.messages import A, CommitCall, Committed, Failed, InflightCall
from sglang_inflight.vocabulary.errors import (
    Conflict,
    HalfDone,
    InflightError,
    OutcomeUnknown,
    RankSilent,
    Refused,
)
from sglang_inflight.vocabulary.kept_kv import FENCE

CALL = CommitCall(update_id="u", weight_version="v1", kept_kv=FENCE)
COMMITTED = Committed(
    weight_version="v1", base_version="v0", epoch=1, stall_ms=1.0, retracted=0, digest="d"
)


class TwoRanks(Ranks):
    """Two ranks with given answers."""

    def __init__(self, *errors: str) -> None:
        self._errors = errors

    async def ask(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        if "silent" in self._errors:
            raise RankSilent("rank dp0 pp0 tp1 did not answer within 120 s")
        answers: list[Any] = [
            Failed(tp_rank=tp_rank, message=f"{error} said so", error=error) if error else COMMITTED
            for tp_rank, error in enumerate(self._errors)
        ]
        return answers


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        (("", "silent"), OutcomeUnknown),
        (("", "Conflict"), HalfDone),
        (("HalfDone", ""), HalfDone),
        (("Conflict", "HalfDone"), HalfDone),
        (("HalfDone", "HalfDone"), HalfDone),
        (("Conflict", "Conflict"), Conflict),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "+".join(value),
)
def test_commit_error_matches_ranks_answers(
    errors: tuple[str, ...], raised: type[InflightError]
) -> None:
    two_phase = TwoPhase.__new__(TwoPhase)
    two_phase._ranks = TwoRanks(*errors)
    with pytest.raises(InflightError) as caught:
        asyncio.run(two_phase._commit_everywhere(CALL, "commit"))
    assert type(caught.value) is raised
    nothing_changed = set(errors) == {"Conflict"}
    assert isinstance(caught.value, Refused) is nothing_changed
