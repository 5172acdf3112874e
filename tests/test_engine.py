"""Pauses and updates through ``sglang.Engine`` while another thread generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.starting import STEP_MS
from sglang_inflight.client import cover_exactly, digest_of_all, digests, read_spans
from tests.support.engine import run_script
from tests.support.engine_calls import NONSENSE, TOKENS
from tests.support.pool import ServerPool

RECEIPT = {"success", "weight_version", "base_version", "epoch", "stall_ms", "ranks"}


@pytest.fixture(scope="module")
def answers(
    pool: ServerPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    pool.discard()
    folder = tmp_path_factory.mktemp("engine")
    answers: dict[str, Any] = run_script(
        "tests.support.engine_calls", checkpoints, folder, {STEP_MS: "25"}
    )
    return answers


def expect_spans(tokens: list[int], spans: list[dict[str, Any]]) -> list[str]:
    """Check that spans match the tokens, and return the spans' versions."""
    assert len(tokens) == TOKENS
    told = read_spans({"weight_versions": spans})
    assert cover_exactly(told, TOKENS)
    for span in told:
        version = int(span.version.removeprefix("v"))
        assert set(tokens[span.start : span.end]) == {marker.token(version)}
    return [span.version for span in told]


@pytest.mark.parametrize(
    ("source", "version", "base"),
    [("disk", "v1", "v0"), ("tensor", "v2", "v1"), ("distributed", "v3", "v2")],
)
def test_update_in_flight_returns_a_receipt(
    answers: dict[str, Any], source: str, version: str, base: str
) -> None:
    receipt = answers[source]
    assert receipt.keys() >= RECEIPT
    assert (receipt["success"], receipt["weight_version"], receipt["base_version"]) == (
        True,
        version,
        base,
    )


def test_other_tensors_than_expected_raise(answers: dict[str, Any]) -> None:
    (rank,) = answers["tensor"]["ranks"]
    assert rank["received_digest"] == digest_of_all(digests(marker.tensors(2)).values())
    assert answers["altered"].startswith("Altered: expected_digests: 'lm_head.weight' came with")


def test_generating_thread_gets_tokens_of_every_version(answers: dict[str, Any]) -> None:
    output = answers["in flight"]
    versions = expect_spans(output["tokens"], output["spans"])
    assert versions[0] == "v0"
    # a pause between v1 and v2 freezes generation, and the rollback returns to v2
    assert [v for v in versions if v in {"v0", "v2"}][:2] == ["v0", "v2"]
    assert answers["rollback"]["weight_version"] == "v2"


def test_pause_and_continue_return_answers(answers: dict[str, Any]) -> None:
    (rank,) = answers["pause"]["ranks"]
    assert (answers["pause"]["mode"], rank["running"]) == ("in_place", 1)
    assert answers["continue"]["paused"] is False


def expect_our_routes(served: dict[str, Any]) -> None:
    (holder,) = served["status"]["holders"]
    assert served["paused"]["pause_id"] == holder["pause_id"]
    assert served["continued"]["paused"] is False


def test_http_app_imported_after_the_engine_has_our_routes(answers: dict[str, Any]) -> None:
    expect_our_routes(answers["served"])


def test_http_app_imported_before_the_engine_has_our_routes(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    pool.discard()
    expect_our_routes(run_script("tests.support.app_before_engine", checkpoints, tmp_path))


def test_refused_update_raises(answers: dict[str, Any]) -> None:
    assert "'/nowhere' is not a directory" in answers["refused"]


def test_async_methods_pause_update_and_release(answers: dict[str, Any]) -> None:
    output = answers["async"]
    assert output["receipt"]["retracted"] == 1
    for released, returned in (answers["moved"], output["moved"]):
        assert (released["paused"], released["hollow"]) == (True, None)
        assert returned["ranks"][0]["bytes"].keys() < released["ranks"][0]["bytes"].keys()
    # the caller's own pause stays in force
    assert (output["moved"][1]["paused"], answers["moved"][1]["paused"]) == (True, False)
    (rank,) = output["paused"]["ranks"]
    assert rank["retracted"] == 1
    assert expect_spans(output["tokens"], output["spans"])[-1] == "v4"


def test_help_lists_the_arguments_of_each_method(answers: dict[str, Any]) -> None:
    for name, (signature, words) in answers["signatures"].items():
        assert "*" not in signature.replace("*, ", ""), name
        assert words, name
        assert "See ``" not in words, name
    signature, _ = answers["signatures"]["pause_generation"]
    assert signature.startswith("(mode: ")
    for field in ("new_id", "lease_s", "timeout_s"):
        assert f"{field}: " in signature
    signature, _ = answers["signatures"]["update_weights_from_disk"]
    for field in ("model_path: ", "expected_version: ", "kv_cache: "):
        assert field in signature


def test_bad_argument_is_named_and_changes_nothing(answers: dict[str, Any]) -> None:
    for name, wrong in NONSENSE.items():
        said = answers["nonsense"][name]
        assert said.startswith(f"Refused: bad argument of {name}: "), said
        assert any(f"`$.{argument}" in said for argument in wrong), said
    assert answers["unknown"].startswith("TypeError: ")
    assert "colour" in answers["unknown"]
    assert answers["after nonsense"] is False


def test_request_values_of_another_type_are_converted_or_refused(answers: dict[str, Any]) -> None:
    """An unconvertible value would end the scheduler."""
    output = answers["loose"]
    assert output["output_ids"] == answers["last"]
    assert len(output["meta_info"]["output_token_logprobs"]) == 3
    assert answers["too loose"].startswith("ValueError: sampling_params.max_new_tokens: ")


def test_blocking_method_in_the_event_loop_raises(answers: dict[str, Any]) -> None:
    """The answer could never arrive there."""
    pause, generate, flush = answers["async"]["in the loop"]
    assert pause.startswith("RuntimeError: ")
    assert "engine.async_pause_generation(...)" in pause
    assert generate.startswith("RuntimeError: ")
    assert "engine.async_flush_cache(...)" in flush
    assert answers["async"]["paused then"] is False
    assert answers["async"]["flushed"] is True


def test_two_engines_of_different_size_work_in_one_process(answers: dict[str, Any]) -> None:
    assert answers["beside"]["ranks"] == [1, 2]
    assert answers["beside"]["flushed"] is True


def test_blocking_method_works_in_a_thread_beside_the_event_loop(answers: dict[str, Any]) -> None:
    beside = answers["beside"]
    assert "engine.async_pause_generation(...)" in beside["in the loop"]
    assert (beside["not paused"], beside["paused"]) == (False, True)
    assert beside["elsewhere"].startswith("RuntimeError: ")
    assert "another event loop" in beside["elsewhere"]


def test_shutdown_answers_waiting_calls(answers: dict[str, Any]) -> None:
    ended = answers["beside"]["ended"]
    assert ended["stream"]["type"] == "abort"
    assert ended["stream"]["message"] == "the engine was shut down"
    for call in ("update", "async update", "async pause"):
        assert ended[call].startswith("OutcomeUnknown: the engine was shut down"), call
    assert "the engine was shut down" in ended["async generate"]
    assert ended["later"] == ended["later generate"] == "Gone: the engine was shut down"


def test_upstreams_blocking_forms_keep_their_answers(answers: dict[str, Any]) -> None:
    assert answers["blocking disk"] == [True, "Succeeded to update model weights.", 0]
    assert answers["sealed"]["tensors"] == len(marker.tensors(1))
    assert [done for done, _ in answers["blocking session"]] == [True, True, True]
    assert answers["blocking failure"][0] is False
    # an update of its own, which changes nothing
    assert answers["without a session"][0] is True
    assert answers["last"] == [marker.token(0)] * 3


def test_contract_is_kept_or_raises(answers: dict[str, Any]) -> None:
    kept, unkept, wrong, late, served = answers["contract"]
    assert len(kept["output_ids"]) == 1
    assert unkept.startswith("NotServed: min_epoch is 1000000, and version ")
    assert wrong.startswith("Refused: bad version contract: ")
    assert "min_epoch" in wrong
    assert late.startswith("NotServed: epoch 1000000: not served after 0 s, ")
    assert served["epoch"] >= 1
    assert answers["rejected"].startswith("Rejected: ")


def test_named_session_refuses_other_callers(answers: dict[str, Any]) -> None:
    session = answers["named session"]
    assert session["renewed"]["session_id"] == session["begun"]["session_id"]
    assert session["stranger"] == (
        f"another weight update is going on: session {session['begun']['session_id']!r} is open. "
        'end_weight_update or abort_weight_update ends it, and on_busy="replace" takes its turn'
    )
    assert (session["end"]["weight_version"], session["end"]["tensors"]) == (
        "named",
        len(marker.tensors(0)),
    )
    assert "is not open" in session["ended"]
