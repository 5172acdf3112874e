"""An answer says what a repetition needs, on servers without a setting for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import Output, pause, prompt, resume, start, update
from tests.support.pool import CHUNK, FLAVOURS, Flavour, ServerPool
from tests.test_bad_requests import expect_refusal, generate

LIVE: dict[str, Any] = {"non_blocking": True}
FLAVOURS["trails_sglang_spans"] = Flavour((), {"SGLANG_INFLIGHT_SPANS": "sglang"})


def recorded(output: Output) -> dict[str, Any]:
    found: dict[str, Any] = output.meta["replay"]
    return found


def test_record_has_prefills_commits_and_retractions(any_server: Server, checkpoints: Path) -> None:
    length = CHUNK + 9
    (generation,) = start(
        any_server, 1, tokens=200, input_ids=prompt(length),
        sampling={"custom_params": {"record": "replay"}},
    )  # fmt: skip
    generation.wait_for_tokens(3)
    receipt = update(any_server, checkpoints, 1, kv_cache="keep", **LIVE)
    pause(any_server, "retract")
    resume(any_server)
    output = generation.output()
    record = recorded(output)
    first, second, commit, retract, *prefills = record["events"]
    assert [first, second] == [["prefill", 0, CHUNK], ["prefill", CHUNK, length]]
    boundary = output.meta["weight_versions"][0]["end"]
    # the forward of each token but the first computes one position more
    assert commit == ["commit", length + boundary - 1, receipt["epoch"]]
    assert retract[0] == "retract"
    assert retract[1] >= commit[1]
    assert prefills[-1][2] == retract[1] + 1
    assert record["weights"][str(receipt["epoch"])] == ["v1", receipt["ranks"][0]["digest"]]
    assert record["weights"][str(record["epoch"])][0] == "v0"
    # a temperature of 0 is SGLang's top_k of 1
    assert record["sampling"] == {"top_k": 1, "ignore_eos": True}
    assert record["server"]["arguments"]["chunked_prefill_size"] == CHUNK
    assert len(json.dumps(record)) < 1500


def test_answer_without_a_wish_has_no_record(any_server: Server) -> None:
    (generation,) = start(any_server, 1, tokens=5)
    assert "replay" not in generation.output().meta


@pytest.mark.parametrize("value", ["all", True, 1])
def test_unknown_record_is_refused(any_server: Server, value: Any) -> None:
    request = generate(sampling={"custom_params": {"record": value}})
    expect_refusal(any_server, *request, 'custom_params.record must be "replay"')


def test_script_needs_its_setting(any_server: Server) -> None:
    custom = {"record": "replay", "replay": {}}
    expect_refusal(
        any_server, *generate(sampling={"custom_params": custom}), "the extension that takes it"
    )


def test_record_without_version_spans_is_refused(pool: ServerPool) -> None:
    server = pool.get(FLAVOURS["trails_sglang_spans"])
    request = generate(sampling={"custom_params": {"record": "replay"}})
    expect_refusal(server, *request, "SGLANG_INFLIGHT_SPANS=sglang")
    pool.restore()
