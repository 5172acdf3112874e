"""Messages between processes: each call names an answer, and answers arrive unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers import io_struct

from sglang_inflight.messages import Described, answers, calls, make_known
from sglang_inflight.plugin import every_hook
from sglang_inflight.vocabulary.answers import (
    Answer,
    Capabilities,
    Holder,
    MemoryStatus,
    PauseStatus,
    StagingStatus,
    WeightsStatus,
)

DESCRIBED = Described(
    call_id="c",
    tp_rank=1,
    capabilities=Capabilities(stage="is quantized by Fp8"),
    pause=PauseStatus(
        state="frozen",
        paused=True,
        mode="wait",
        holders=(Holder(pause_id="p", mode="wait", lease_left_s=None),),
        running=1,
        waiting=2,
    ),
    weights=WeightsStatus(weight_version="v1", epoch=3, digest=None, previous_version="v0"),
    staging=StagingStatus(
        mode="device",
        state="open",
        update_id="u",
        tensors=1,
        bytes=2,
        can_roll_back=False,
        dirty=None,
        refusal=None,
        groups={"g": "in step"},
    ),
    memory=MemoryStatus(weights="lost"),
)


# imports the extensions' calls
every_hook()


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.__name__)
def test_every_call_names_a_known_answer(call: Any) -> None:
    assert call.answer in answers()


def test_answer_survives_msgpack() -> None:
    make_known()
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(DESCRIBED)) == DESCRIBED


def test_an_answer_is_read_by_attribute_and_by_key() -> None:
    pause: Answer = DESCRIBED.pause
    assert pause["holders"][0]["mode"] == "wait"
    assert {**pause} == {name: getattr(pause, name) for name in pause}
    assert ("mode" in pause, "colour" in pause) == (True, False)
    assert (pause.get("mode"), pause.get("colour"), len(pause)) == ("wait", None, 7)
    with pytest.raises(KeyError):
        pause["colour"]


def test_answer_as_json_has_plain_values() -> None:
    """Plain values down to the innermost, and only the fields."""
    assert DESCRIBED.pause.as_json() == {
        "state": "frozen",
        "paused": True,
        "mode": "wait",
        "holders": [
            {"pause_id": "p", "mode": "wait", "lease_left_s": None, "new_requests": "queue"}
        ],
        "new_requests": "queue",
        "running": 1,
        "waiting": 2,
    }
