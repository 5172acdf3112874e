"""Callers leave at every tick of every call, and every pause or session left has a known name.

The front end's objects are real. A caller can release an answered call by name; an unanswered call
leaves nothing. After the release nothing is held: no pause or session on the rank, no turn, lock,
timer or task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from sglang_inflight.extensions.memory.messages import ReleaseCall
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.http.endpoints import while_connected
from sglang_inflight.frontend.http.routes import endpoint_of
from sglang_inflight.vocabulary.answers import MEMORY, Begun, Grant
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    ContinueBody,
    DiskBody,
    DistributedBody,
    EndBody,
    JoinGroupBody,
    LeaveGroupBody,
    NameBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    RollbackBody,
    SealBody,
    TensorBody,
)
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import Conflict, Dropped, InflightError
from tests.support.front_end import FrontEnd
from tests.support.front_end import no_arguments as no_arguments
from tests.support.ticks import run, tick, timers, until_idle

LEASE_S = 3600.0
SESSION = "s"
# ticks before the rank carries out a call
DELAYS = (0, 1, 4)
# upper bounds on the ticks of a call and of its clean-up
MOST_TICKS, AGAIN = 500, 12

pytestmark = pytest.mark.usefixtures("no_arguments")


@dataclass(frozen=True)
class Case:
    """``made`` is the abandoned call. Another caller made ``first`` before, and stays."""

    made: Callable[[FrontEnd], Awaitable[Any]]
    first: tuple[Callable[[FrontEnd], Awaitable[Any]], ...] = ()


def begin(**how: Any) -> Callable[[FrontEnd], Awaitable[Any]]:
    body = BeginBody(lease_s=LEASE_S, **how)
    return lambda front: front.call(body)


def pause(**how: Any) -> Callable[[FrontEnd], Awaitable[Any]]:
    body = PauseBody(**how)
    return lambda front: front.call(body)


def piece(**how: Any) -> Callable[[FrontEnd], Awaitable[Any]]:
    return lambda front: front.call(
        TensorBody(serialized_named_tensors=[b""], weight_version="v1", **how)
    )


def broadcast(front: FrontEnd) -> Awaitable[Any]:
    return front.call(
        DistributedBody(names=["a"], dtypes=["float32"], shapes=[[1]], non_blocking=True)
    )


def join(front: FrontEnd) -> Awaitable[Any]:
    return front.groups.join(
        JoinGroupBody(
            master_address="a", master_port=1, rank_offset=1, world_size=2, group_name="g"
        )
    )


def release(front: FrontEnd) -> Awaitable[Any]:
    return front.call(ReleaseMemoryBody())


SEAL = SealBody(session_id=SESSION)
END = EndBody(session_id=SESSION, non_blocking=True, weight_version="v1")
OPEN = begin(non_blocking=True, new_id=SESSION)
STAGE = piece(session_id=SESSION, non_blocking=True)


def seal(front: FrontEnd) -> Awaitable[Any]:
    return front.call(SEAL)


CASES = {
    "pause": Case(pause(mode="in_place")),
    "pause by a chosen name": Case(pause(mode="retract", new_id="p", lease_s=LEASE_S)),
    "pause that waits": Case(pause(mode="wait", timeout_s=60.0)),
    "pause that is renewed": Case(
        pause(pause_id="p", lease_s=LEASE_S), (pause(mode="in_place", new_id="p"),)
    ),
    "pause beside another": Case(pause(mode="abort"), (pause(mode="in_place", new_id="p"),)),
    "continue": Case(
        lambda front: front.call(ContinueBody()), (pause(mode="in_place", new_id="p"),)
    ),
    "begin": Case(begin(non_blocking=True)),
    "begin by a chosen name": Case(OPEN),
    "begin as SGLang does": Case(lambda front: front.call(BeginBody())),
    "begin in place of another": Case(begin(non_blocking=True, on_busy="replace"), (OPEN, STAGE)),
    "renew": Case(begin(session_id=SESSION), (OPEN,)),
    "piece": Case(STAGE, (OPEN,)),
    "seal": Case(seal, (OPEN, STAGE)),
    "end": Case(lambda front: front.call(END), (OPEN, STAGE)),
    "end of what is sealed": Case(lambda front: front.call(END), (OPEN, STAGE, seal)),
    "end that waits for requests": Case(
        lambda front: front.call(EndBody()), (lambda front: front.call(BeginBody()),)
    ),
    "abort": Case(lambda front: front.call(AbortUpdateBody(session_id=SESSION)), (OPEN, STAGE)),
    "update": Case(piece(non_blocking=True)),
    "update that waits for requests": Case(piece()),
    "update in place of another": Case(piece(non_blocking=True, on_busy="replace"), (OPEN, STAGE)),
    "update from disk": Case(
        lambda front: front.call(DiskBody(model_path="/v1", non_blocking=True))
    ),
    "broadcast": Case(broadcast, (join,)),
    "rollback": Case(lambda front: front.call(RollbackBody())),
    "rename": Case(lambda front: front.call(NameBody(new_version="a name"))),
    "release": Case(release),
    "resume": Case(lambda front: front.call(ResumeMemoryBody()), (release,)),
    "join": Case(join),
    "leave": Case(lambda front: front.groups.leave(LeaveGroupBody(group_name="g")), (join,)),
}


class Leaving:
    """A request whose caller leaves when ``left`` is set."""

    url = type("URL", (), {"path": "/a_call"})

    def __init__(self, body: bytes | None = None) -> None:
        """``body`` is None if it was read before."""
        self.left = asyncio.Event()
        self._body = [{"type": "http.request", "body": body}] if body is not None else []

    async def receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}


async def disconnect(front: FrontEnd, made: Awaitable[Any], after: int) -> tuple[Any, bool]:
    """End a call's connection. Return the answer, if any, and whether the answer came first."""
    request: Any = Leaving()
    call = asyncio.ensure_future(front.ask(while_connected(request, made)))
    await tick(after)
    if call.done():
        return call.result(), True
    request.left.set()
    try:
        return await call, False
    except Dropped:
        return None, False


async def cancel_twice(
    front: FrontEnd, made: Awaitable[Any], after: int, again: int
) -> tuple[Any, bool]:
    """Cancel a task of the same process, and cancel again while it cleans up."""
    call = asyncio.ensure_future(made)
    await tick(after)
    is_done = call.done()
    for _ in range(2):
        call.cancel()
        await tick(again)
    try:
        return await call, is_done
    except asyncio.CancelledError:
        return None, False


Leave = Callable[[FrontEnd, Awaitable[Any]], Awaitable[tuple[Any, bool]]]


async def play(case: Case, delay: int, leave: Leave) -> bool:
    """Return whether the call had its answer before its caller left."""
    front = FrontEnd(delay=delay)
    for first in case.first:
        await front.ask(first(front))
    holders, session = {*front.rank.holders, MEMORY}, front.two_phase.current
    answer, is_done = await leave(front, case.made(front))
    await until_idle()
    assert front.manager.config_value("weight_version") == front.rank.version
    current = front.two_phase.current
    match answer:
        case Grant(pause_id=pause_id):
            await front.call(ContinueBody(pause_id=pause_id))
        case Begun(session_id=session_id):
            assert current is not None
            assert len(timers()) == (current.lease_s is not None)
            await front.call(AbortUpdateBody(session_id=session_id))
        case None:
            # no caller knows a new name, so no pause and no session may be new
            assert holders.issuperset(front.rank.holders)
            assert current in (None, session)
    await release_named(front)
    await expect_nothing_held(front)
    return is_done


async def release_named(front: FrontEnd) -> None:
    """Release all that the staying caller, or a reader of the status, can name."""
    if front.rank.is_released:
        await front.call(ResumeMemoryBody())
    assert MEMORY not in front.rank.holders, "it cannot be taken again"
    if front.rank.holders:
        assert front.rank.holders == ["p"], "a pause was taken without a grant"
        await front.call(ContinueBody(pause_id="p"))
    if (session := front.two_phase.current) is not None:
        await front.call(AbortUpdateBody(session_id=session.id))
    await until_idle()


async def expect_nothing_held(front: FrontEnd) -> None:
    rank = front.rank
    assert (rank.holders, rank.update_id, rank.is_released) == ([], None, False)
    assert not front.manager.is_pause
    assert front.two_phase.current is None
    assert not front.two_phase._turn.locked()
    assert not front.memory._moving.locked()
    assert front.pauses._taking == {}
    assert front.ranks._collectors == {}
    assert front.lifetime._ends == set()
    assert timers() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    # the next caller gets the turn
    await front.call(
        TensorBody(serialized_named_tensors=[b""], non_blocking=True, weight_version="last")
    )
    assert front.manager.config_value("weight_version") == rank.version == "last"


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("name", CASES)
def test_disconnect_leaves_nothing_held(name: str, delay: int) -> None:
    for after in range(MOST_TICKS):
        if leave_at(CASES[name], delay, disconnect, after):
            return
    raise AssertionError("the call does not end")


@pytest.mark.parametrize("name", CASES)
def test_double_cancel_leaves_nothing_held(name: str) -> None:
    for after in range(MOST_TICKS):
        if any([leave_at(CASES[name], 1, cancel_twice, after, again) for again in range(AGAIN)]):
            return
    raise AssertionError("the call does not end")


def leave_at(case: Case, delay: int, leave: Callable[..., Any], *ticks: int) -> bool:
    try:
        return run(play(case, delay, lambda front, made: leave(front, made, *ticks)))
    except BaseException as error:
        error.add_note(f"the caller left after {ticks} ticks")
        raise


@pytest.mark.parametrize("name", ["pause_generation", "begin_weight_update"])
@pytest.mark.parametrize("named", [False, True])
def test_disconnect_before_the_answer_leaves_nothing_held(name: str, named: bool) -> None:
    """Nobody knows the name of the result unless the caller chose it."""

    async def play_call() -> None:
        front = FrontEnd(delay=1)
        leaving = Leaving(b'{"new_id": "p"}' if named else b"{}")

        async def handle_and_disconnect(body: Any) -> Any:
            answer = await front.call(body)
            leaving.left.set()
            return answer

        by_name = {**front.handlers.by_name, name: handle_and_disconnect}
        handlers = Handlers(by_name, front.handlers.piece)
        frontend: Any = SimpleNamespace(handlers=handlers, pauses=front.pauses)
        answer: Any = await endpoint_of(TABLE[name], frontend)(
            Request({"type": "http", "headers": [], "path": name}, leaving.receive)
        )
        assert answer.status_code == 400
        await until_idle()
        if named and name == "pause_generation":
            assert front.rank.holders == ["p"]
        elif named:
            assert front.rank.update_id == "p"
        else:
            await expect_nothing_held(front)

    run(play_call())


@pytest.mark.parametrize("name", ["pause by a chosen name", "begin by a chosen name"])
def test_two_cancelled_callers_of_one_name_leave_nothing_held(name: str) -> None:
    """The call is made again while the first caller's clean-up runs."""

    async def both(front: FrontEnd, made: Awaitable[Any], first: int, then: int) -> Any:
        one = asyncio.ensure_future(made)
        two = asyncio.ensure_future(CASES[name].made(front))
        await tick(first)
        is_done = one.done()
        one.cancel()
        await tick(then)
        two.cancel()
        ended = await asyncio.gather(one, two, return_exceptions=True)
        answers = [each for each in ended if not isinstance(each, BaseException)]
        # one caller may hear that the other has dropped the session
        assert all(
            isinstance(each, asyncio.CancelledError | Dropped) or each in answers for each in ended
        )
        return (answers[0] if answers else None), is_done

    for first in range(MOST_TICKS):
        if any([leave_at(CASES[name], 1, both, first, then) for then in range(AGAIN)]):
            return
    raise AssertionError("the call does not end")


def test_update_is_refused_during_memory_release() -> None:
    """The refusal holds after the release's last caller has left."""

    async def is_beside(after: int) -> bool:
        front = FrontEnd(delay=5)
        releasing = asyncio.ensure_future(release(front))
        await tick(after)
        releasing.cancel()
        await tick(2)
        moves = any(isinstance(call, ReleaseCall) for call in front.manager.sent)
        moves = moves and not front.rank.is_released
        if moves:
            body = DiskBody(model_path="/v1", non_blocking=True, on_busy="refuse")
            with pytest.raises(Conflict, match="another weight update is going on"):
                await front.call(body)
        await until_idle()
        return moves

    assert any([run(is_beside(after)) for after in range(40)])


def test_late_commit_answer_publishes_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller hears "unknown", and the rank's later answer publishes the version."""
    monkeypatch.setattr("sglang_inflight.frontend.updates.two_phase.COMMIT_TIMEOUT_S", 0.0)

    async def play_call() -> None:
        front = FrontEnd(delay=50)
        body = DiskBody(model_path="/v1", weight_version="v1", non_blocking=True)
        with pytest.raises(InflightError, match="sent to all ranks"):
            await front.ask(front.call(body))
        assert front.manager.config_value("weight_version") == front.rank.version == "v0"
        await until_idle()
        assert front.manager.config_value("weight_version") == front.rank.version == "v1"
        assert front.manager.model_path == "/v1"

    run(play_call())
