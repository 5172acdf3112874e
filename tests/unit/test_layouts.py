"""A layout is sent once, and its digest from then on: client, front end and ranks."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_inflight.client import layout_digest
from sglang_inflight.client.buckets import FEWEST_KEPT, Piece, fill_buckets
from sglang_inflight.client.layouts import SentLayouts
from sglang_inflight.frontend.updates import layouts
from sglang_inflight.messages import (
    CommitCall,
    DistributedSource,
    Failed,
    GiveUpTransferCall,
    JoinGroupCall,
    LaidOut,
    RankAnswer,
    StageCall,
    TensorSource,
)
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayouts
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    DistributedBody,
    EndBody,
    JoinGroupBody,
    TensorBody,
)
from sglang_inflight.vocabulary.errors import RankFailed, Refused, UnknownLayout
from tests.support.front_end import FrontEnd, OneRank
from tests.support.front_end import no_arguments as no_arguments
from tests.support.ticks import run, tick

Lists = tuple[list[str], list[str], list[list[int]]]
# more than one part, of ASCII and of other characters
LONG: Lists = (
    [f'layers.{n}."ä\\\u2028' for n in range(600)],
    ["bfloat16", "float8_e4m3fn", "uint8"] * 200,
    [[], [2, 3], [0]] * 200,
)


def one(name: str) -> Lists:
    return [name], ["float32"], [[1]]


def whole(lists: Lists) -> dict[str, Any]:
    names, dtypes, shapes = lists
    digest = layout_digest(*lists)
    return {"names": names, "dtypes": dtypes, "shapes": shapes, "layout_digest": digest}


def by_digest(lists: Lists) -> dict[str, Any]:
    return {"layout_digest": layout_digest(*lists)}


def test_digest_is_of_lines_that_any_client_can_write() -> None:
    lines = "".join(
        json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"
        for row in zip(*LONG, strict=True)
    )
    assert layout_digest(*LONG) == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("at", range(3))
def test_each_list_and_its_order_make_the_digest(at: int) -> None:
    lists: list[Any] = [[*each] for each in LONG]
    lists[at][1], lists[at][2] = lists[at][2], lists[at][1]
    assert layout_digest(*lists) != layout_digest(*LONG)


# ---- bodies


@pytest.mark.parametrize("missing", ["names", "dtypes", "shapes"])
def test_part_of_a_layout_is_refused(missing: str) -> None:
    given = whole(one("a"))
    del given[missing]
    with pytest.raises(Refused, match=f"`{missing}` is missing"):
        DistributedBody(**given)


def test_broadcast_without_a_layout_is_refused() -> None:
    with pytest.raises(Refused, match="missing required field `names`"):
        DistributedBody()


def test_layout_of_tensors_needs_a_bucket() -> None:
    with pytest.raises(Refused, match="flattened_bucket"):
        TensorBody(serialized_named_tensors=[], **whole(one("a")))


# ---- front end


class Keeping(OneRank):
    """A rank that keeps layouts as it is told, and refuses a digest that it does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts = CallLayouts()
        self.fails = False
        # names of the tensors of each staged call
        self.staged: list[list[str]] = []

    def _do(self, call: Any) -> RankAnswer:
        if isinstance(call, StageCall):
            self.layouts.take_in(call.source)
        if self.fails and isinstance(call, StageCall | JoinGroupCall):
            return Failed(message="no", error="RankFailed")
        if not isinstance(call, StageCall):
            return super()._do(call)
        assert isinstance(call.source, LaidOut)
        try:
            self.staged.append([*self.layouts.find(call.source).names])
        except Refused as error:
            return Failed(message=f"{error}", error="Refused")
        return super()._do(call)


class Front:
    """A front end that a test makes within its loop."""

    def __init__(self) -> None:
        self.rank = Keeping()

    def start(self) -> None:
        self._front = FrontEnd()
        self._front.manager._rank = self.rank
        self.call = self._front.call

    async def broadcast(self, fields: dict[str, Any], **more: Any) -> Any:
        how: dict[str, Any] = {
            "group_name": "g",
            "non_blocking": True,
            "load_format": "flattened_bucket",
        }
        return await self.call(DistributedBody(**{**how, **fields, **more}))

    @property
    def sources(self) -> list[Any]:
        return [call.source for call in self.rank.told if isinstance(call, StageCall)]

    @property
    def gave_up(self) -> bool:
        return any(isinstance(call, GiveUpTransferCall) for call in self.rank.told)


@pytest.fixture
def front(no_arguments: None) -> Front:
    return Front()


def test_layout_goes_to_the_ranks_once(front: Front) -> None:
    async def play() -> None:
        front.start()
        for fields in (whole(LONG), by_digest(LONG), whole(LONG)):
            await front.broadcast(fields)
        payload = {"serialized_named_tensors": [b""], "load_format": "flattened_bucket"}
        await front.call(TensorBody(**{**by_digest(LONG), **payload}))

    run(play())
    assert [bool(source.layout_parts) for source in front.sources] == [True, False, False, False]
    assert [type(source) for source in front.sources] == [*[DistributedSource] * 3, TensorSource]
    assert front.rank.staged == [LONG[0]] * 4
    assert not any(source.names or source.dtypes or source.shapes for source in front.sources)


def test_call_without_a_digest_is_sent_as_it_came(front: Front) -> None:
    names, dtypes, shapes = LONG

    async def play() -> None:
        front.start()
        await front.broadcast({"names": names, "dtypes": dtypes, "shapes": shapes})

    run(play())
    (source,) = front.sources
    assert (source.names, source.dtypes, source.shapes) == LONG
    assert (source.layout_digest, source.layout_parts) == (None, [])


def test_scheduler_decodes_no_long_lists(front: Front) -> None:
    """A call of SGLang's own clients has no digest, and nothing is kept of it."""
    names, dtypes, shapes = ([*each] * 4 for each in LONG)

    async def play() -> None:
        front.start()
        await front.broadcast({"names": names, "dtypes": dtypes, "shapes": shapes})
        with pytest.raises(Refused):
            await front.broadcast({"names": names, "dtypes": dtypes[1:], "shapes": shapes})

    run(play())
    whole, unequal = front.sources
    assert (whole.names, whole.dtypes, whole.shapes) == ([], [], [])
    assert (unequal.names, unequal.layout_parts) == (names, [])
    assert front.rank.staged == [names]
    assert front.rank.layouts._kept == {}


def test_unknown_layout_changes_nothing(front: Front) -> None:
    async def play() -> None:
        front.start()
        with pytest.raises(UnknownLayout, match="repeat the call"):
            await front.broadcast(by_digest(LONG))
        assert front.rank.told == []
        await front.broadcast(whole(LONG))

    run(play())
    assert front.rank.staged == [LONG[0]]
    assert not front.gave_up


def test_digest_of_another_layout_is_refused(front: Front) -> None:
    async def play() -> None:
        front.start()
        await front.broadcast(whole(one("a")))
        with pytest.raises(Refused, match="have the digest"):
            await front.broadcast(whole(one("b")) | by_digest(one("a")))
        with pytest.raises(Refused, match="of one length"):
            await front.broadcast(whole(one("b")) | {"dtypes": []})

    run(play())
    assert front.rank.staged == [["a"]]


def test_layout_of_a_failed_call_is_not_kept(front: Front) -> None:
    """A rank may have failed before it has read the layout."""

    async def play() -> None:
        front.start()
        front.rank.fails = True
        with pytest.raises(Refused):
            await front.broadcast(whole(LONG))
        front.rank.fails = False
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(LONG), group_name="another")
        await front.broadcast(whole(LONG), group_name="another")

    run(play())
    assert [bool(source.layout_parts) for source in front.sources] == [True, True]


@pytest.mark.parametrize("repeats", [True, False])
def test_session_waits_for_a_piece_without_its_layout(front: Front, repeats: bool) -> None:
    async def play() -> None:
        front.start()
        begun = await front.call(BeginBody(non_blocking=True))
        of_session = {"session_id": begun["session_id"]}
        await front.broadcast(whole(one("a")), **of_session)
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(one("b")), **of_session)
        if repeats:
            await front.broadcast(whole(one("b")), **of_session)
            await front.call(EndBody(**of_session, non_blocking=True))
            return
        with pytest.raises(Refused, match="not repeated with the whole layout"):
            await front.call(EndBody(**of_session, non_blocking=True))

    run(play())
    assert any(isinstance(call, CommitCall) for call in front.rank.told) == repeats


def test_group_takes_no_other_call_after_an_unknown_layout(front: Front) -> None:
    """The trainer's broadcast waits, and would be received under the other call's names."""

    async def play() -> None:
        front.start()
        await front.broadcast(whole(one("b")))
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(one("a")))
        # a retry of the same call
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(one("a")))
        assert not front.gave_up
        with pytest.raises(Refused, match="not the same call"):
            await front.broadcast(by_digest(one("b")))

    run(play())
    assert front.rank.staged == [["b"]]
    assert front.gave_up


@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_group_owes_nothing(front: Front, is_new: bool) -> None:
    """A join of the name is refused while its group is of use."""
    join = JoinGroupBody(
        master_address="h", master_port=1, rank_offset=1, world_size=2, group_name="g"
    )

    async def play() -> None:
        front.start()
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(one("a")))
        front.rank.fails = not is_new
        with nullcontext() if is_new else pytest.raises(RankFailed):
            await front.call(join)
        front.rank.fails = False
        with nullcontext() if is_new else pytest.raises(Refused, match="not the same call"):
            await front.broadcast(whole(one("b")))

    run(play())
    assert front.rank.staged == [["b"]] * is_new


def test_longest_unused_layout_is_forgotten(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MOST_LAYOUTS", 2)

    async def play() -> None:
        front.start()
        for fields in (whole(one("a")), whole(one("b")), by_digest(one("a")), whole(one("c"))):
            await front.broadcast(fields)
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(one("b")))
        for name in "ac":
            await front.broadcast(by_digest(one(name)), group_name="another")

    run(play())
    assert front.rank.staged == [["a"], ["b"], ["a"], ["c"], ["a"], ["c"]]
    assert front.rank.layouts._kept.keys() == {layout_digest(*one(name)) for name in "ac"}


def test_layout_beyond_the_limit_is_sent_each_time(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MOST_BYTES", 1)

    async def play() -> None:
        front.start()
        await front.broadcast(whole(LONG))
        with pytest.raises(UnknownLayout):
            await front.broadcast(by_digest(LONG))
        await front.broadcast(whole(LONG))

    run(play())
    assert front.rank.staged == [LONG[0]] * 2
    assert not front.gave_up


Step = tuple[str, bool, bool, int]


@pytest.mark.usefixtures("no_arguments")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans(), st.integers(0, 6)),
        max_size=12,
    )
)
def test_front_end_knows_what_ranks_keep(steps: list[Step]) -> None:
    """Pieces of a session overtake single calls, which wait for their turn with layouts taken in.

    A step is a layout, whether it comes whole, whether it is the session's, and ticks to the next.
    """
    rank = Keeping()

    async def play() -> list[Any]:
        front = FrontEnd(delay=2)
        front.manager._rank = rank
        begun = await front.call(BeginBody(non_blocking=True))
        calls = []
        for at, (name, is_whole, is_piece, ticks) in enumerate(steps):
            fields = whole(one(name)) if is_whole else by_digest(one(name))
            session_id = begun["session_id"] if is_piece else None
            body = DistributedBody(
                **fields, group_name=f"{at}", non_blocking=True, session_id=session_id
            )
            calls.append(asyncio.ensure_future(front.call(body)))
            await tick(ticks)
        pieces = [call for call, (_, _, is_piece, _) in zip(calls, steps, strict=True) if is_piece]
        await asyncio.gather(*pieces, return_exceptions=True)
        await front.call(AbortUpdateBody(session_id=begun["session_id"]))
        answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "MOST_LAYOUTS", 2)
        answers = run(play())
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert {type(error) for error in refused} <= {UnknownLayout}
    took = [
        [name] for (name, *_), answer in zip(steps, answers, strict=True) if answer not in refused
    ]
    assert sorted(rank.staged) == sorted(took)


# ---- client


class Server:
    """A server that keeps the layouts of ``kept``, and notes the bodies."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.bodies: list[list[str]] = []

    async def take(self, **body: Any) -> dict[str, Any]:
        self.bodies.append(sorted(body))
        if "names" not in body and body["layout_digest"] not in self.kept:
            raise UnknownLayout("unknown")
        if body.get("layout_digest"):
            self.kept.add(body["layout_digest"])
        return {}


WHOLE = ["dtypes", "layout_digest", "names", "shapes"]
SHORT = ["layout_digest"]


def test_client_sends_a_layout_again_to_a_restarted_server() -> None:
    async def play() -> Server:
        server, sent = Server(), SentLayouts()
        for _ in range(2):
            await sent.send(server.take, whole(LONG))
        server.kept.clear()
        for _ in range(2):
            await sent.send(server.take, whole(LONG))
        return server

    assert run(play()).bodies == [WHOLE, SHORT, SHORT, WHOLE, SHORT]


def test_client_does_not_count_on_a_refused_layout() -> None:
    async def refuse(**_: Any) -> dict[str, Any]:
        raise Refused("no")

    async def play() -> Server:
        server, sent = Server(), SentLayouts()
        with pytest.raises(Refused):
            await sent.send(refuse, whole(LONG))
        await sent.send(server.take, whole(LONG))
        return server

    assert run(play()).bodies == [WHOLE]


def test_client_sends_lists_without_a_digest_as_they_are() -> None:
    lists = {name: value for name, value in whole(LONG).items() if name in ("names",)}

    async def play() -> Server:
        server, sent = Server(), SentLayouts()
        for _ in range(2):
            await sent.send(server.take, lists)
        return server

    assert run(play()).bodies == [["names"]] * 2


def test_sender_names_long_layouts_of_whole_tensors() -> None:
    tensors = [(f"w{n}", torch.ones(1)) for n in range(FEWEST_KEPT)]
    (long,) = fill_buckets((Piece.whole(*pair) for pair in tensors), 1 << 20, "cpu")
    (short,) = fill_buckets((Piece.whole(*pair) for pair in tensors[1:]), 1 << 20, "cpu")
    assert long.describe()["layout_digest"] == layout_digest(long.names, long.dtypes, long.shapes)
    assert short.describe()["layout_digest"] is None
