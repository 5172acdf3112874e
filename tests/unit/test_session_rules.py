"""How much a session has to bring: its own word, or ``SGLANG_INFLIGHT_SESSIONS``."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from sglang_inflight.messages import OpenCall
from sglang_inflight.vocabulary.bodies import (
    BeginBody,
    DiskBody,
    PauseBody,
    TensorBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import Refused, list_names
from tests.support.front_end import SETTINGS, FrontEnd
from tests.support.front_end import no_arguments as no_arguments
from tests.support.ticks import run

pytestmark = pytest.mark.usefixtures("no_arguments")


class Rule(NamedTuple):
    partial: bool
    as_before: bool
    may_be_empty: bool


ANYTHING = Rule(partial=True, as_before=False, may_be_empty=True)
WHOLE = Rule(partial=False, as_before=False, may_be_empty=False)
AS_BEFORE = Rule(partial=True, as_before=True, may_be_empty=False)
OF_SETTING = {"partial": ANYTHING, "whole": WHOLE, "as_before": AS_BEFORE}
PIECE = TensorBody(serialized_named_tensors=[b""])


def front_end(sessions: str, *, transparent: bool = False) -> FrontEnd:
    settings = replace(SETTINGS, sessions=sessions)
    return FrontEnd(delay=1, transparent=transparent, settings=settings)


def rule_of(front: FrontEnd) -> Rule:
    (call,) = [call for call in front.rank.told if isinstance(call, OpenCall)]
    return Rule(call.partial, call.as_before, call.may_be_empty)


@pytest.mark.parametrize("sessions", OF_SETTING)
@pytest.mark.parametrize("partial", [None, True, False])
def test_explicit_partial_overrides_the_setting(sessions: str, partial: bool | None) -> None:
    async def play() -> Rule:
        front = front_end(sessions)
        await front.call(BeginBody(partial=partial))
        return rule_of(front)

    expected = {None: OF_SETTING[sessions], True: ANYTHING, False: WHOLE}
    assert run(play()) == expected[partial]


@pytest.mark.parametrize("sessions", OF_SETTING)
@pytest.mark.parametrize(
    ("call", "expected"),
    [(PIECE, True), (DiskBody(model_path="/v1"), False)],
    ids=["tensor", "disk"],
)
def test_single_call_follows_no_setting(sessions: str, call: UpdateBody, expected: bool) -> None:
    async def play() -> Rule:
        front = front_end(sessions)
        await front.call(call)
        return rule_of(front)

    assert run(play()) == Rule(partial=expected, as_before=False, may_be_empty=False)


@pytest.mark.parametrize("sessions", OF_SETTING)
@pytest.mark.parametrize(
    ("begin", "first", "expected"),
    [
        (None, PIECE, None),
        (BeginBody(), PIECE, None),
        (BeginBody(partial=True), PIECE, ANYTHING),
        (None, TensorBody(serialized_named_tensors=[b""], partial=True), ANYTHING),
        (None, DiskBody(model_path="/v1"), WHOLE),
    ],
    ids=["tensor", "begin", "partial begin", "partial tensor", "disk"],
)
def test_window_follows_the_setting_like_a_session(
    sessions: str, begin: BeginBody | None, first: UpdateBody, expected: Rule | None
) -> None:
    async def play() -> Rule:
        front = front_end(sessions, transparent=True)
        await front.call(PauseBody(mode="retract"))
        if begin is not None:
            await front.call(begin)
        await front.call(first)
        return rule_of(front)

    # a window's session is named, so it holds a tensor in any case
    found = run(play())
    assert found == (expected or OF_SETTING[sessions])._replace(may_be_empty=False)


def test_whole_session_of_a_draft_is_refused_before_it_has_the_turn() -> None:
    async def play() -> None:
        front = front_end("whole")
        with pytest.raises(Refused, match="SGLANG_INFLIGHT_SESSIONS=whole"):
            await front.call(BeginBody(selector="draft"))
        assert front.rank.told == []
        await front.call(BeginBody(selector="draft", partial=True))

    run(play())


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        # AReaL's two calls
        ("abort", "in_place", "abort"),
        ("retract", "in_place", "retract"),
        ("in_place", "retract", "retract"),
        ("retract", "abort", "abort"),
    ],
)
def test_second_pause_of_a_window_takes_back_nothing(first: str, second: str, mode: str) -> None:
    async def play() -> None:
        front = front_end("partial", transparent=True)
        await front.call(PauseBody(mode=first))  # type: ignore[arg-type]
        grant = await front.call(PauseBody(mode=second))  # type: ignore[arg-type]
        assert (grant["mode"], grant["paused"]) == (mode, False)

    run(play())


def test_long_list_of_names_ends_with_the_number_of_the_others() -> None:
    assert list_names([*"abcdefghij"]) == "a, b, c, d, e, f, g, h and 2 more"
    assert list_names([*"abcdefgh"]) == "a, b, c, d, e, f, g, h"
