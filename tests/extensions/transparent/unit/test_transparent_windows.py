"""A window of ``Transparent`` loses a piece while its ranks are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from sglang_inflight.extensions.transparent import TransparentSettings
from sglang_inflight.extensions.transparent.windows import Transparent
from sglang_inflight.frontend.handlers import direct_handlers
from sglang_inflight.frontend.http import endpoints
from sglang_inflight.frontend.http.endpoints import with_body, with_payloads
from sglang_inflight.frontend.http.large_bodies import LARGE_STRING_BYTES
from sglang_inflight.frontend.http.routes import endpoint_of
from sglang_inflight.messages import CommitCall, DropCall, GiveUpTransferCall, OpenCall, StageCall
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.answers import Release
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    ContinueBody,
    DistributedBody,
    EndBody,
    IPCBody,
    NameBody,
    NoBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    TensorBody,
)
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Dropped,
    InflightError,
    Refused,
    UnknownLayout,
)
from sglang_inflight.vocabulary.layouts import layout_digest
from tests.support.front_end import (
    NAMES,
    NO_STATUS,
    FrontEnd,
)
from tests.support.front_end import no_arguments as no_arguments
from tests.support.ticks import run, tick, timers, until_idle
from tests.unit.fakes import ALL, SETTINGS, Play

GRACE_S = read(TransparentSettings).transparent_grace_s


class NoPauses:
    async def resume(self, body: ContinueBody) -> Release:
        return Release(message="Generation continued successfully.", paused=False)


class TransparentPlay(Play):
    def __init__(self) -> None:
        super().__init__()
        direct = direct_handlers(
            self.manager,
            NoPauses(),  # type: ignore[arg-type]
            self.updates,
            self.groups,
            NO_STATUS,
        )
        self.handlers = Transparent(
            direct,
            self.manager,
            NoPauses(),  # type: ignore[arg-type]
            self.updates,
            self.groups,
            SETTINGS,
            ALL,
            grace_s=GRACE_S,
            in_background=lambda doing: doing.close(),
        ).handlers

    def call(self, body: Body) -> Coroutine[Any, Any, Any]:
        return self.handlers[NAMES[type(body)]](body)

    def send(self) -> asyncio.Future[Any]:
        self.make(self.call(self.piece()))
        return self.made[-1]

    def sent(self) -> list[type]:
        return [type(call) for call in self.ranks.called]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates work without a server's settings."""
    no_store = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr("sglang_inflight.capabilities.get_memory", lambda: no_store)


@pytest.mark.parametrize("others", [0, 1])
def test_cancelled_first_piece_drops_window(others: int) -> None:
    """Pieces from other callers do not replace the missing piece."""

    async def play_window() -> None:
        play = TransparentPlay()
        await play.call(PauseBody(mode="in_place"))
        for _ in range(others + 1):
            play.send()
            await play.settle()
        assert play.sent() == [OpenCall]
        play.made[0].cancel()
        await play.settle()
        await play.finish()
        late = play.send()
        await play.settle()
        for dropped in (*play.made[1:-1], late):
            with pytest.raises(Dropped, match="caller has left"):
                dropped.result()
        continuing = asyncio.ensure_future(play.call(ContinueBody()))
        play.made.append(continuing)
        await play.settle()
        await play.finish()
        with pytest.raises(Dropped, match="caller has left"):
            continuing.result()
        assert CommitCall not in play.sent()
        assert play.sent().count(OpenCall) == play.sent().count(DropCall) == 1
        await expect_next_window_works(play)

    run(play_window())


def test_unreadable_piece_drops_window() -> None:
    async def play_window() -> None:
        play = TransparentPlay()
        await play.call(PauseBody(mode="in_place"))
        play.send()
        await play.settle()
        await play.finish()
        with pytest.raises(Refused), play.handlers.piece():
            raise Refused("bad request body")
        play.make(play.call(ContinueBody()))
        await play.settle()
        await play.finish()
        with pytest.raises(Dropped, match="bad request body"):
            play.made[-1].result()
        await expect_next_window_works(play)

    run(play_window())


SPOILT = {
    "no base64": b'{"serialized_named_tensors": ["%b"]}' % (b"%" * 2 * LARGE_STRING_BYTES),
    "a large string elsewhere": b'{"serialized_named_tensors": [], "weight_version": "%b"}'
    % (b"A" * 2 * LARGE_STRING_BYTES),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_refused_large_piece_drops_window(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    monkeypatch.setattr(endpoints, "get_parallel", lambda: SimpleNamespace(nnodes=1))

    async def play_window() -> None:
        play = await window_with_a_piece()
        endpoint = with_payloads(play.call, play.handlers.piece)
        answer = await endpoint(arriving(SPOILT[spoilt], is_whole=True))
        assert answer.status_code == 400
        await expect_nothing_to_go_live(play, "bad request body")

    run(play_window())


@pytest.mark.parametrize("route", ["tensor", "distributed", "ipc"])
def test_disconnect_within_a_body_drops_window(route: str) -> None:
    async def play_window() -> None:
        play = await window_with_a_piece()
        frontend: Any = SimpleNamespace(handlers=play.handlers, groups=play.groups)
        routes: dict[str, Any] = {
            "tensor": with_payloads(play.call, play.handlers.piece),
            "distributed": endpoint_of(TABLE["update_weights_from_distributed"], frontend),
            "ipc": with_body(IPCBody, play.call, play.handlers.piece),
        }
        with pytest.raises(ClientDisconnect):
            await routes[route](arriving(b"{", is_whole=False))
        await expect_nothing_to_go_live(play, "has not arrived whole")

    run(play_window())


def test_late_disconnect_keeps_next_window() -> None:
    """A trainer's death is noticed late."""

    async def play_window() -> None:
        play = await window_with_a_piece()
        arriving_late = play.handlers.piece()
        arriving_late.__enter__()
        play.make(play.call(ContinueBody()))
        await play.settle()
        await play.finish()
        await play.call(PauseBody(mode="in_place"))
        left = ClientDisconnect()
        assert not arriving_late.__exit__(ClientDisconnect, left, None)
        with pytest.raises(Dropped, match="before a piece had arrived whole"):
            play.made[-1].result()
        await expect_next_window_works(play)

    run(play_window())


@pytest.mark.parametrize("refused", [StageCall, OpenCall])
def test_refused_broadcast_breaks_its_group(refused: type) -> None:
    """A piece refused because of an earlier piece breaks its group, too."""
    piece = DistributedBody(names=["a"], dtypes=["float32"], shapes=[[1]], group_name="g")

    async def play_window() -> None:
        play = TransparentPlay()
        play.ranks.refusable = (refused,)
        play.refuse()
        await play.call(PauseBody(mode="in_place"))
        for error, why in ((Refused, "no"), (Dropped, "the update was dropped.*: no")):
            play.ranks.called.clear()
            play.make(play.call(piece))
            await play.settle()
            await play.finish()
            with pytest.raises(error, match=f"{why}.*Group 'g' is out of step"):
                play.made[-1].result()
            given_up = [each for each in play.ranks.called if isinstance(each, GiveUpTransferCall)]
            assert {each.group_name for each in given_up} == {"g"}
        await expect_nothing_to_go_live(play, "no")

    run(play_window())


@pytest.mark.parametrize("repeats", [True, False])
def test_window_waits_for_a_piece_without_its_layout(repeats: bool) -> None:
    layout: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    digest = layout_digest(**layout)

    async def play_window() -> None:
        play = TransparentPlay()
        await play.call(PauseBody(mode="in_place"))
        play.make(play.call(DistributedBody(layout_digest=digest)))
        if repeats:
            play.make(play.call(DistributedBody(**layout, layout_digest=digest)))
        await play.settle()
        await play.finish()
        with pytest.raises(UnknownLayout):
            play.made[0].result()
        play.make(play.call(ContinueBody()))
        await play.settle()
        await play.finish()
        assert (CommitCall in play.sent()) == repeats
        if not repeats:
            with pytest.raises(Refused, match="not repeated with the whole layout"):
                play.made[-1].result()
        await expect_next_window_works(play)

    run(play_window())


def arriving(content: bytes, *, is_whole: bool) -> Request:
    messages = [{"type": "http.request", "body": content, "more_body": not is_whole}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


async def window_with_a_piece() -> TransparentPlay:
    play = TransparentPlay()
    await play.call(PauseBody(mode="in_place"))
    piece = play.send()
    await play.settle()
    await play.finish()
    piece.result()
    return play


async def expect_nothing_to_go_live(play: TransparentPlay, why: str) -> None:
    continuing = asyncio.ensure_future(play.call(ContinueBody()))
    play.made.append(continuing)
    await play.settle()
    await play.finish()
    with pytest.raises(Dropped, match=why):
        continuing.result()
    assert CommitCall not in play.sent()
    await expect_next_window_works(play)


async def expect_next_window_works(play: TransparentPlay) -> None:
    assert play.two_phase.current is None
    await play.call(PauseBody(mode="in_place"))
    piece = play.send()
    await play.settle()
    await play.finish()
    piece.result()
    play.make(play.call(ContinueBody()))
    await play.settle()
    await play.finish()
    assert play.made[-1].result().receipt.weight_version == f"v{play.ranks.epoch}"


# ---- at every tick ---------------------------------------------------------------------

# upper bound on the ticks of a call
MOST_TICKS = 300
RETRACT = PauseBody(mode="retract")
PIECE = TensorBody(serialized_named_tensors=[b""], weight_version="v1")


async def continue_generation(front: FrontEnd) -> Any:
    """Return the outcome of ``continue_generation`` for a caller that stays."""
    try:
        return await front.ask(front.call(ContinueBody()))
    except InflightError as error:
        return error


async def expect_nothing_held(front: FrontEnd) -> None:
    await until_idle()
    assert front.two_phase.current is None
    assert front.rank.update_id is None
    assert front.rank.holders == []
    assert not await front.handlers["is_paused"](NoBody())
    assert timers() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


def at_each_tick(play_window: Callable[[int], Coroutine[Any, Any, bool]]) -> None:
    """Play with each number of ticks until the call ends before its caller leaves."""
    for ticks in range(MOST_TICKS):
        try:
            if run(play_window(ticks)):
                return
        except BaseException as error:
            error.add_note(f"after {ticks} ticks")
            raise
    raise AssertionError("it does not end")


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("staged", [0, 1])
def test_cancelled_piece_drops_window_at_every_tick(staged: int) -> None:
    """At any tick everything goes live or nothing, and ``continue_generation`` reports it."""

    async def play_window(ticks: int) -> bool:
        front = FrontEnd(delay=1, transparent=True)
        await front.call(RETRACT)
        for _ in range(staged):
            await front.call(PIECE)
        piece = asyncio.ensure_future(front.call(PIECE))
        # the piece is sent after the first tick
        await tick(1 + ticks)
        is_done = piece.done()
        piece.cancel()
        await asyncio.wait({piece})
        answer = await continue_generation(front)
        if piece.cancelled():
            assert isinstance(answer, Dropped)
            assert front.rank.version == "v0"
        else:
            assert front.rank.version == answer.receipt.weight_version == "v1"
        assert front.manager.config_value("weight_version") == front.rank.version
        await expect_nothing_held(front)
        return is_done

    at_each_tick(play_window)


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("staged", [0, 1])
def test_continue_during_a_piece_waits_for_it(staged: int) -> None:
    """The piece's session may not be open yet."""

    async def play_window(ticks: int) -> bool:
        front = FrontEnd(delay=3, transparent=True)
        await front.call(RETRACT)
        for _ in range(staged):
            await front.call(PIECE)
        piece = asyncio.ensure_future(front.call(PIECE))
        await tick(1 + ticks)
        is_done = piece.done()
        answer = await continue_generation(front)
        await piece
        assert front.rank.version == answer.receipt.weight_version == "v1"
        await expect_nothing_held(front)
        return is_done

    at_each_tick(play_window)


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("refused", [False, True])
def test_repeated_continue_reports_update_outcome(refused: bool) -> None:
    """The first caller left at any tick."""

    async def play_window(ticks: int) -> bool:
        front = FrontEnd(delay=1, transparent=True)
        await front.call(RETRACT)
        await front.call(PIECE)
        if refused:
            with pytest.raises(Refused), front.handlers.piece():
                raise Refused("bad request body")
        first = asyncio.ensure_future(front.call(ContinueBody()))
        await tick(1 + ticks)
        is_done = first.done()
        first.cancel()
        await asyncio.wait({first})
        if refused and first.cancelled():
            answer = await continue_generation(front)
            assert isinstance(answer, Dropped)
            assert "bad request body" in str(answer)
        for _ in range(2):
            answer = await continue_generation(front)
            if refused:
                # an earlier caller has heard the outcome
                assert (answer.paused, front.rank.version) == (False, "v0")
            else:
                assert front.rank.version == answer.receipt.weight_version == "v1"
        assert front.rank.epoch == (not refused)
        await expect_nothing_held(front)
        # the next window has an outcome of its own
        await front.call(RETRACT)
        assert (await continue_generation(front)).receipt is None
        return is_done

    at_each_tick(play_window)


@pytest.mark.usefixtures("no_arguments")
def test_new_window_during_a_commit_gets_its_own_version() -> None:
    async def play_window(ticks: int) -> bool:
        front = FrontEnd(delay=4, transparent=True)
        await front.call(RETRACT)
        await front.call(PIECE)
        first = asyncio.ensure_future(front.call(ContinueBody()))
        await tick(1 + ticks)
        is_done = first.done()
        first.cancel()
        await front.call(RETRACT)
        await front.call(msgspec.structs.replace(PIECE, weight_version="v2"))
        assert (await continue_generation(front)).receipt.weight_version == "v2"
        assert front.rank.epoch == 2
        await expect_nothing_held(front)
        return is_done

    at_each_tick(play_window)


OTHER_CALLS: dict[str, Callable[[FrontEnd], Coroutine[Any, Any, Any]]] = {
    "pause again": lambda front: front.call(PauseBody(mode="in_place")),
    "real pause": lambda front: front.call(PauseBody(mode="in_place", lease_s=3600.0)),
    "begin": lambda front: front.call(BeginBody()),
    "begin over a version": lambda front: front.call(BeginBody(expected_version="v0")),
    "end": lambda front: front.call(EndBody()),
    "abort": lambda front: front.call(AbortUpdateBody()),
    "rename": lambda front: front.call(NameBody(new_version="a name")),
    "release": lambda front: front.call(ReleaseMemoryBody()),
}


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("staged", [0, 1])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_cancelled_call_in_a_window_leaves_nothing_held(name: str, staged: int) -> None:
    """The next ``continue_generation`` ends everything left."""

    async def play_window(ticks: int) -> bool:
        front = FrontEnd(delay=1, transparent=True)
        await front.call(RETRACT)
        for _ in range(staged):
            await front.call(PIECE)
        call = asyncio.ensure_future(front.ask(OTHER_CALLS[name](front)))
        await tick(1 + ticks)
        is_done = call.done()
        call.cancel()
        await asyncio.wait({call})
        await until_idle()
        if front.rank.is_released:
            await front.call(ResumeMemoryBody())
        await continue_generation(front)
        await expect_nothing_held(front)
        assert front.manager.config_value("weight_version") == front.rank.version
        return is_done

    at_each_tick(play_window)


@pytest.mark.usefixtures("no_arguments")
def test_dead_client_leaves_pause_in_status() -> None:
    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        await front.call(RETRACT)
        await front.call(BeginBody())
        (timer,) = timers()
        left_s = timer.when() - asyncio.get_running_loop().time()
        assert GRACE_S < left_s <= SETTINGS.update_timeout_s
        timer._run()
        timer.cancel()
        await until_idle()
        assert len(front.rank.holders) == 1
        # a client still alive goes on from there
        await front.call(PIECE)
        assert (await continue_generation(front)).receipt.weight_version == "v1"
        await expect_nothing_held(front)

    run(play_window())


# ---- fields of a window's calls --------------------------------------------------------

OTHER = "another version"
WRONG_BASES: dict[str, list[Body]] = {
    "the begin's": [BeginBody(expected_version=OTHER)],
    "a later begin's": [PIECE, BeginBody(expected_version=OTHER)],
    "the first piece's": [msgspec.structs.replace(PIECE, expected_version=OTHER)],
    "a later piece's": [PIECE, msgspec.structs.replace(PIECE, expected_version=OTHER)],
    "a piece's after a begin": [
        BeginBody(expected_version="v0"),
        msgspec.structs.replace(PIECE, expected_version=OTHER),
    ],
}


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("whose", WRONG_BASES)
def test_window_over_another_base_than_expected_is_refused(whose: str) -> None:
    *before, refused = WRONG_BASES[whose]

    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        await front.call(RETRACT)
        for body in before:
            await front.call(body)
        with pytest.raises(Conflict, match="is serving"):
            await front.call(refused)
        # a client may go on without reading the answer
        with pytest.raises(Dropped, match="is serving"):
            await front.call(PIECE)
        assert isinstance(await continue_generation(front), Dropped)
        assert front.rank.version == "v0"
        await expect_nothing_held(front)

    run(play_window())


@pytest.mark.usefixtures("no_arguments")
def test_window_over_the_expected_base_goes_live() -> None:
    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        await front.call(RETRACT)
        await front.call(BeginBody(expected_version="v0"))
        for expected in ("v0", None):
            await front.call(msgspec.structs.replace(PIECE, expected_version=expected))
        await front.call(EndBody())
        assert (await continue_generation(front)).receipt.weight_version == "v1"
        (opened,) = [call for call in front.rank.told if isinstance(call, OpenCall)]
        assert opened.expected_version == "v0"
        await expect_nothing_held(front)

    run(play_window())


A_DIGEST = "0123456789abcdef"
# another value of each field that shows in the ranks' messages, or is refused
SAID: dict[type[Body], dict[str, Any]] = {
    BeginBody: {
        "selector": "target", "expected_version": "v0", "partial": False, "lease_s": 5.0,
        "session_id": "s", "new_id": "s", "received_digest": True, "non_blocking": True,
    },
    TensorBody: {
        "weight_version": "v7", "torch_empty_cache": True, "kv_cache": "keep", "kv_max_age": 3,
        "expected_version": "v0", "partial": False, "timeout_s": 5.0, "selector": "target",
        "session_id": "s", "abort_all_requests": True, "expected_digests": {"a": A_DIGEST},
        "expected_digest": A_DIGEST, "received_digest": True, "load_format": "direct",
        "serialized_named_tensors": [b"a"], "names": ["a"], "dtypes": ["uint8"], "shapes": [[1]],
        "layout_digest": "0" * 64,
    },
    EndBody: {
        "session_id": "s", "non_blocking": True, "weight_version": "v7", "flush_cache": False,
        "kv_cache": "keep", "kv_max_age": 3, "torch_empty_cache": True,
        "expected_digest": A_DIGEST,
    },
}  # fmt: skip
# the window's own: its mode decides about KV, and its updates never wait for requests to end
OF_THE_WINDOW = {(TensorBody, "flush_cache"), (TensorBody, "non_blocking")}
# seen beside another update alone
BESIDE_OTHERS = {(BeginBody, "on_busy"), (TensorBody, "on_busy")}


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize(("shape", "name"), [(kind, name) for kind in SAID for name in SAID[kind]])
def test_field_in_a_window_is_honoured_or_refused(shape: type[Body], name: str) -> None:
    run(expect_effect(shape, name))


def test_every_field_in_a_window_is_accounted_for() -> None:
    fields = {(kind, name) for kind in SAID for name in kind.__struct_fields__}
    said = {(kind, name) for kind in SAID for name in SAID[kind]}
    assert fields == said | OF_THE_WINDOW | BESIDE_OTHERS


async def expect_effect(shape: type[Body], name: str) -> None:
    assert await effect_of(shape, {name: SAID[shape][name]}) != await effect_of(shape, {})


async def effect_of(shape: type[Body], said: dict[str, Any]) -> Any:
    """Play a window with ``said`` in its call of ``shape``: return what the ranks were told."""
    front = FrontEnd(transparent=True)
    aborts: list[Any] = []
    front.manager.abort_request = lambda **which: aborts.append(which)
    await front.call(RETRACT)
    for body in (BeginBody(), PIECE, EndBody()):
        try:
            if isinstance(body, shape):
                body = msgspec.structs.replace(body, **said)
            await front.call(body)
        except InflightError as error:
            return repr(error)
    session = front.two_phase.current
    lease_s = session.lease_s if session is not None else None
    outcome = await continue_generation(front)
    if isinstance(outcome, InflightError):
        return repr(outcome)
    told = [msgspec.structs.asdict(call) for call in front.rank.told]
    for call in told:
        for of_each in ("call_id", "update_id", "pause_id"):
            call.pop(of_each, None)
        if "timeout_s" in call:
            call["timeout_s"] = round(call["timeout_s"])
    return lease_s, aborts, told


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("on_busy", ["wait", "refuse", "replace"])
@pytest.mark.parametrize("says", ["begin", "piece"])
def test_window_meets_another_session_as_its_caller_says(on_busy: Any, says: str) -> None:
    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        other = await front.call(BeginBody(non_blocking=True))
        await front.call(RETRACT)
        begin, piece = BeginBody(), PIECE
        if says == "begin":
            begin = BeginBody(on_busy=on_busy)
        else:
            piece = msgspec.structs.replace(PIECE, on_busy=on_busy)
        await front.call(begin)
        if on_busy == "replace":
            await front.call(piece)
            assert (await continue_generation(front)).receipt.weight_version == "v1"
        else:
            with pytest.raises(Refused, match="open" if on_busy == "wait" else other.session_id):
                await front.call(piece)
            assert isinstance(await continue_generation(front), Dropped)
            await front.call(AbortUpdateBody(session_id=other.session_id))
        await expect_nothing_held(front)

    run(play_window())


@pytest.mark.usefixtures("no_arguments")
def test_late_begin_cannot_change_how_a_window_has_begun() -> None:
    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        await front.call(RETRACT)
        await front.call(PIECE)
        # SGLang's clients may say again what is so
        await front.call(BeginBody())
        with pytest.raises(Conflict, match="selector and received_digest"):
            await front.call(BeginBody(selector="target", received_digest=True))
        assert isinstance(await continue_generation(front), Dropped)
        await expect_nothing_held(front)

    run(play_window())


@pytest.mark.usefixtures("no_arguments")
def test_refused_release_leaves_a_window_running() -> None:
    async def play_window() -> None:
        front = FrontEnd(transparent=True)
        await front.call(RETRACT)
        await front.call(PIECE)
        with pytest.raises(Refused):
            await front.call(ReleaseMemoryBody())
        assert front.rank.holders == []
        assert not front.manager.is_pause
        assert (await continue_generation(front)).receipt.weight_version == "v1"
        await expect_nothing_held(front)

    run(play_window())
