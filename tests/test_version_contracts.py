"""A request gets the weights it asks for, or a refusal that says what is served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import PLAIN, Server, schedulers
from sglang_inflight.client import Client, Fleet
from sglang_inflight.vocabulary.errors import NotServed
from tests.support.load import (
    ENDLESS,
    PASSES,
    Generation,
    ask,
    expect_all_go_on,
    more_tokens,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    until,
    until_empty,
    until_waiting,
    update,
)
from tests.support.pool import CHUNK
from tests.support.updates import Call

pytest_plugins = ["tests.support.fixtures"]

SAMPLING = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
OPENAI = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": prompt(), "sampling_params": SAMPLING},
    "/v1/completions": {"model": "default", "prompt": prompt(), **OPENAI},
    "/v1/chat/completions": {
        "model": "default",
        "messages": [{"role": "user", "content": "t300 t301"}],
        **OPENAI,
    },
    "/inference/v1/generate": {
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": 2, "temperature": 0, "ignore_eos": True},
    },
}
AT_ONCE = {"version_timeout_s": 0}
ANTHROPIC = {
    "model": "default",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "t300"}],
}


def post(server: Server, route: str, **fields: Any) -> httpx.Response:
    body = {**BODIES[route], **fields}
    return httpx.post(server.url + route, json=body, timeout=60, **PLAIN)


def expect_refused(answer: httpx.Response, *words: str, version: str, epoch: int) -> None:
    assert answer.status_code == 503, answer.text
    for word in words:
        assert word in answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-inflight-weight-version"] == version
    assert answer.headers["x-inflight-epoch"] == str(epoch)


def epoch_of(server: Server) -> int:
    epoch: int = status(server)["epoch"]
    return epoch


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", BODIES)
def test_contract_at_the_top_level_is_ignored_by_no_route(
    vllm_server: Server, route: str, stream: bool
) -> None:
    wrong = post(vllm_server, route, stream=stream, min_epoch=-1)
    assert wrong.status_code == 400
    assert "min_epoch" in wrong.text
    epoch = epoch_of(vllm_server)
    unkept = post(vllm_server, route, stream=stream, min_epoch=epoch + 1, **AT_ONCE)
    expect_refused(unkept, "min_epoch", version="v0", epoch=epoch)
    assert unkept.json()["weight_version"] == "v0"
    assert unkept.json()["epoch"] == epoch
    kept = post(vllm_server, route, stream=stream, min_epoch=epoch, **AT_ONCE)
    assert kept.status_code == 200
    assert kept.headers["x-inflight-weight-version-start"] == "v0"
    assert kept.headers["x-inflight-epoch-start"] == str(epoch)
    assert ("x-inflight-epoch-end" in kept.headers) is not stream


@pytest.mark.parametrize(
    ("contract", "broken", "kept"),
    [
        ({"min_weight_version": 42}, "41", "42"),
        ({"min_weight_version": "042"}, "v42", "100"),
        ({"exact_weight_version": "41"}, "42", "41"),
    ],
)
def test_request_waits_at_the_door_for_its_version(
    any_server: Server, checkpoints: Path, contract: Any, broken: str, kept: str
) -> None:
    update(any_server, checkpoints, 1, weight_version=broken, non_blocking=True)
    answer = post(any_server, "/generate", **contract, **AT_ONCE)
    expect_refused(answer, broken, version=broken, epoch=epoch_of(any_server))
    # it holds up neither other requests nor the update
    (held,) = start(any_server, 1, tokens=4, **contract)
    running = start_running(any_server, 2, tokens=ENDLESS)
    assert not held.has_ended
    assert status(any_server)["waiting"] == 0
    update(any_server, checkpoints, 2, weight_version=kept, non_blocking=True)
    output = held.output()
    assert output.tokens == [marker.token(2)] * 4
    assert output.meta["weight_versions"][0]["version"] == kept
    expect_all_end(running)


def expect_all_end(running: list[Generation]) -> None:
    for generation in running:
        generation.abort()
        generation.wait_for_end()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("kv", ["fence", "recompute"])
def test_commit_after_the_door_gives_no_token_of_another_version(
    any_server: Server, checkpoints: Path, kv: str, stream: bool
) -> None:
    """The door lets a request through, and the scheduler ends it at the commit."""
    (beside,) = start_running(any_server, 1, tokens=ENDLESS)
    pause(any_server, "in_place")
    (bound,) = start(any_server, 1, tokens=4, stream=stream, exact_weight_version="v0")
    (free,) = start(any_server, 1, tokens=4, min_epoch=0)
    # its grammar is not compiled in the pause
    (in_grammar_queue,) = start(
        any_server, 1, tokens=4, stream=stream, exact_weight_version="v0",
        sampling={"regex": f"(a|b|{kv}|{stream})+"},
    )  # fmt: skip
    until_waiting(any_server, 3)
    update(any_server, checkpoints, 1, kv_cache=kv)
    # both end in the pause already
    bound.wait_for_end()
    in_grammar_queue.wait_for_end()
    assert (in_grammar_queue.refusal is None) == stream
    if stream:
        output = bound.output()
        assert output.tokens == []
        assert output.meta["finish_reason"]["status_code"] == 503
        assert "exact_weight_version is 'v0'" in output.meta["finish_reason"]["message"]
    else:
        assert bound.status == 503
        assert "exact_weight_version is 'v0'" in (bound.refusal or "")
    resume(any_server)
    assert free.output().tokens == [marker.token(1)] * 4
    expect_all_go_on([beside])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_request_behind_a_commit_that_its_door_has_not_heard_of(
    any_server: Server, checkpoints: Path, stream: bool
) -> None:
    """Its scheduler stands still, so the rollback's answer is late, and the door knows v1 alone."""
    update(any_server, checkpoints, 1, non_blocking=True)
    (rank,) = schedulers(any_server.process.pid)
    rank.suspend()
    try:
        ending = Call(any_server, "/inflight/rollback", {})
        # the rollback is on its way before the requests
        for _ in range(PASSES):
            assert any_server.get("/get_weight_version")["weight_version"] == "v1"
        (bound,) = start(
            any_server, 1, tokens=4, stream=stream, exact_weight_version="v1", **AT_ONCE
        )
        (free,) = start(any_server, 1, tokens=4, min_epoch=0)
        assert not ending.is_answered
    finally:
        rank.resume()
    assert ending.answer()["weight_version"] == "v0"
    bound.wait_for_end()
    if stream:
        output = bound.output()
        assert output.tokens == []
        assert output.meta["finish_reason"]["status_code"] == 503
    else:
        assert (bound.status, bound.count) == (503, 0)
    assert free.output().tokens == [marker.token(0)] * 4


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("route", BODIES)
def test_route_says_why_a_commit_ended_its_request(
    vllm_server: Server, checkpoints: Path, route: str, stream: bool, samples: int
) -> None:
    pause(vllm_server, "in_place")
    body: dict[str, Any] = {"n": samples}
    if "sampling_params" in BODIES[route]:
        body = {"sampling_params": {**BODIES[route]["sampling_params"], **body}}
    body |= {"stream": stream, "exact_weight_version": "v0"}
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(post, vllm_server, route, **body)
        until_waiting(vllm_server, 1)
        update(vllm_server, checkpoints, 1, flush_cache=False)
        answer = answering.result()
    if not stream:
        assert answer.status_code == 503
        # they may lag the commit; the message does not
        assert answer.headers.keys() >= {"retry-after", "x-inflight-weight-version"}
    assert "exact_weight_version is 'v0', and version 'v1'" in answer.text
    assert "503" in answer.text
    assert "t301" not in answer.text
    resume(vllm_server)


def test_commit_in_the_middle_of_a_prompt_gives_no_token(
    any_server: Server, checkpoints: Path
) -> None:
    """The first chunk has run with the old weights, and the first token would be the new ones'."""
    pause(any_server, "in_place")
    contract = {"exact_weight_version": "v0"}
    (bound,) = start(any_server, 1, tokens=4, input_ids=prompt(8 * CHUNK), **contract)
    until_waiting(any_server, 1)
    resume(any_server)
    (rank,) = pause(any_server, "in_place")["ranks"]
    assert (rank["running"], rank["waiting"]) == (1, 0)
    assert bound.count == 0
    update(any_server, checkpoints, 1, kv_cache="fence")
    resume(any_server)
    bound.wait_for_end()
    output = bound.output()
    assert output.tokens == []
    assert output.meta["finish_reason"]["status_code"] == 503
    expect_no_kv_is_lost(any_server)


@pytest.mark.parametrize("flavour", ["tp2_server", "dp2_server"])
def test_ranks_end_the_same_requests(
    request: pytest.FixtureRequest, checkpoints: Path, flavour: str
) -> None:
    server: Server = request.getfixturevalue(flavour)
    update(server, checkpoints, 0)
    running = start_running(server, 2, tokens=ENDLESS)
    pause(server, "in_place")
    bound = start(server, 4, tokens=4, exact_weight_version="v0")
    free = start(server, 2, tokens=4, min_epoch=epoch_of(server) + 1)
    until("all are queued", lambda: sum(r["waiting"] for r in status(server)["ranks"]) >= 4)
    update(server, checkpoints, 1, kv_cache="fence")
    resume(server)
    for generation in bound:
        output = generation.output()
        assert (output.tokens, output.meta["finish_reason"]["status_code"]) == ([], 503)
    for generation in free:
        assert generation.output().tokens == [marker.token(1)] * 4
    expect_all_go_on(running)
    expect_no_kv_is_lost(server)


def expect_no_kv_is_lost(server: Server) -> None:
    """SGLang ends an idle server if KV slots are missing from its pool."""
    until_empty(server)
    assert Generation(server, tokens=2, stream=False).output().finish_reason == "length"


def test_token_of_the_right_version_is_kept_across_commits(
    any_server: Server, checkpoints: Path
) -> None:
    contract: dict[str, Any] = {"exact_weight_version": "v0", **AT_ONCE}
    running = start_running(any_server, 2, tokens=ENDLESS, **contract)
    for version, kv in ((1, "recompute"), (2, "fence")):
        update(any_server, checkpoints, version, non_blocking=True, kv_cache=kv)
        more_tokens(running)
    for output in expect_all_go_on(running):
        assert [span["version"] for span in output.meta["weight_versions"]] == ["v0", "v1", "v2"]


def test_rollback_and_new_name_end_requests_that_wait(
    any_server: Server, checkpoints: Path
) -> None:
    update(any_server, checkpoints, 1, non_blocking=True)
    epoch = epoch_of(any_server)
    pause(any_server, "in_place")
    (bound,) = start(any_server, 1, tokens=4, exact_weight_version="v1")
    (newer,) = start(any_server, 1, tokens=4, min_epoch=epoch + 1)
    until_waiting(any_server, 1)
    ask(any_server, "POST", "/inflight/rollback", {})
    assert bound.output().meta["finish_reason"]["status_code"] == 503
    until_waiting(any_server, 1)
    (renamed,) = start(any_server, 1, tokens=4, exact_weight_version="v0")
    until_waiting(any_server, 2)
    rename = {"new_version": "other", "abort_all_requests": False}
    ask(any_server, "POST", "/update_weight_version", rename)
    assert renamed.output().meta["finish_reason"]["status_code"] == 503
    resume(any_server)
    # a rollback begins an epoch, and the version of an epoch is not asked for
    assert newer.output().tokens == [marker.token(0)] * 4


def test_batch_and_samples_wait_and_end_together(any_server: Server, checkpoints: Path) -> None:
    epoch = epoch_of(any_server)
    inputs = [prompt(), prompt()]
    (batch,) = start(any_server, 1, tokens=3, input_ids=inputs, outputs=2, min_epoch=epoch + 1)
    (samples,) = start(any_server, 1, tokens=3, n=2, min_epoch=epoch + 1)
    sampling = [{**SAMPLING, "custom_params": {"min_epoch": wanted}} for wanted in (0, epoch + 1)]
    body = {"input_ids": inputs, "sampling_params": sampling}
    answer = post(any_server, "/generate", **body, **AT_ONCE)
    expect_refused(answer, "min_epoch", version="v0", epoch=epoch)
    update(any_server, checkpoints, 1, non_blocking=True)
    for generation in (batch, samples):
        assert [output.tokens for output in generation.outputs()] == [[marker.token(1)] * 3] * 2
    pause(any_server, "in_place")
    for stream in (True, False):
        (ended,) = start(
            any_server, 1, tokens=3, n=2, stream=stream, exact_weight_version="v1", outputs=2
        )
        until_waiting(any_server, 1)
        update(any_server, checkpoints, 2, flush_cache=False)
        ended.wait_for_end()
        assert ended.count == 0
        if not stream:
            assert ended.status == 503
        update(any_server, checkpoints, 1, flush_cache=False)
    resume(any_server)
    expect_no_kv_is_lost(any_server)


def test_headers_name_the_versions_at_start_and_end(any_server: Server, checkpoints: Path) -> None:
    epoch = epoch_of(any_server)
    body = {"input_ids": prompt(), "sampling_params": {**SAMPLING, "max_new_tokens": 400}}
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(post, any_server, "/generate", **body)
        until("it runs", lambda: status(any_server)["running"])
        update(any_server, checkpoints, 1, non_blocking=True, weight_version="é 1%")
        answer = answering.result()
    headers = answer.headers
    assert headers["x-inflight-weight-version-start"] == "v0"
    assert headers["x-inflight-epoch-start"] == str(epoch)
    assert headers["x-inflight-weight-version-end"] == "%C3%A9 1%25"
    assert headers["x-inflight-epoch-end"] == str(epoch + 1)


def test_disconnect_or_abort_ends_a_wait(any_server: Server, checkpoints: Path) -> None:
    left, aborted, stays = start(any_server, 3, tokens=2, exact_weight_version="v1")
    fails = Generation(any_server, tokens=2, stream=False, rid="mine", exact_weight_version="v1")
    left.disconnect()

    def have_ended() -> bool:
        # an abort that comes before its request ends nothing
        aborted.abort()
        fails.abort()
        return aborted.has_ended and fails.has_ended

    until("both aborts arrive", have_ended)
    assert "aborted while it waited" in (fails.refusal or "")
    assert not stays.has_ended
    update(any_server, checkpoints, 1, non_blocking=True)
    assert stays.output().tokens == [marker.token(1)] * 2
    left.wait_for_end()
    assert left.count == 0


def test_pause_rejects_new_requests_alone(any_server: Server) -> None:
    (running,) = start_running(any_server, 1, tokens=ENDLESS)
    pause(any_server, "in_place", new_id="queues")
    (queued,) = start(any_server, 1, tokens=2)
    until_waiting(any_server, 1)
    pause(any_server, "in_place", new_id="rejects", new_requests="reject")
    now = status(any_server)
    assert now["new_requests"] == "reject"
    assert [holder["new_requests"] for holder in now["holders"]] == ["queue", "reject"]
    for stream in (False, True):
        answer = post(any_server, "/generate", stream=stream)
        expect_refused(answer, "reject", version="v0", epoch=now["epoch"])
    embeddings = any_server.post("/v1/messages", ANTHROPIC)
    assert embeddings["status_code"] == 503, embeddings
    assert any_server.get("/health_generate")["status_code"] == 200
    assert not queued.has_ended
    # a renewal may change it, and one without the field does not
    pause(any_server, "in_place", pause_id="rejects", new_requests="queue")
    assert status(any_server)["new_requests"] == "queue"
    pause(any_server, "in_place", pause_id="rejects", new_requests="reject")
    pause(any_server, "in_place", pause_id="rejects")
    assert post(any_server, "/generate").status_code == 503
    resume(any_server, pause_id="rejects")
    (later,) = start(any_server, 1, tokens=2)
    until_waiting(any_server, 2)
    resume(any_server)
    for generation in (queued, later):
        assert generation.output().finish_reason == "length"
    expect_all_go_on([running])


def test_rejecting_lease_ends_while_another_pause_is_held(any_server: Server) -> None:
    pause(any_server, "in_place")
    pause(any_server, "in_place", new_requests="reject", lease_s=0.5)
    (held,) = start(any_server, 1, tokens=2, stream=False)

    def is_queued() -> bool:
        nonlocal held
        if held.has_ended:
            assert held.status == 503
            (held,) = start(any_server, 1, tokens=2, stream=False)
        return bool(status(any_server)["waiting"])

    until("requests are queued again", is_queued)
    assert status(any_server)["paused"]
    resume(any_server)
    assert held.output().finish_reason == "length"


def test_draining_pause_rejects_from_its_call_on(any_server: Server) -> None:
    (running,) = start_running(any_server, 1, tokens=ENDLESS)
    pausing = Call(any_server, "/pause_generation", {"mode": "wait", "new_requests": "reject"})
    until("it drains", lambda: status(any_server)["state"] == "draining")
    assert post(any_server, "/generate").status_code == 503
    running.abort()
    assert pausing.answer()["paused"]
    assert post(any_server, "/generate").status_code == 503
    resume(any_server)
    assert post(any_server, "/generate").status_code == 200


def test_wait_is_answered_when_the_version_is_served(any_server: Server, checkpoints: Path) -> None:
    epoch = epoch_of(any_server)
    served = ask(any_server, "GET", f"/inflight/wait?epoch={epoch}&weight_version=v0")
    assert served == {"weight_version": "v0", "epoch": epoch}
    with Client(any_server.url) as client, ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(client.wait_for, epoch=epoch + 1),
            pool.submit(client.wait_for, weight_version="v1"),
        ]
        update(any_server, checkpoints, 1, non_blocking=True)
        assert [(w.result().weight_version, w.result().epoch) for w in waits] == [
            ("v1", epoch + 1)
        ] * 2
        with pytest.raises(NotServed, match=f"epoch {epoch + 2}: not served after 0"):
            client.wait_for(epoch=epoch + 2, timeout_s=0)
    late = httpx.get(any_server.url + f"/inflight/wait?epoch={epoch + 2}&timeout_s=0", **PLAIN)
    expect_refused(late, "not served after 0 s", version="v1", epoch=epoch + 1)
    with Fleet([any_server.url]) as fleet:
        assert fleet.wait_for(weight_version="v1").answers[any_server.url].epoch == epoch + 1
    assert any_server.get("/inflight/wait")["epoch"] == epoch + 1
    for query in ("?epoch=-1", "?epoch=one", "?weight_version=", "?version=1"):
        assert any_server.get(f"/inflight/wait{query}")["status_code"] == 400, query


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"model": "default", "input": "t300"}),
        ("/v1/messages", ANTHROPIC),
        ("/v1/embeddings", {"model": "default", "input": "t300"}),
        ("/encode", {"text": "t300"}),
        ("/api/chat", {"model": "default", "messages": [{"role": "user", "content": "t300"}]}),
        ("/vertex_generate", {"instances": [{"text": "t300"}]}),
    ],
)
def test_route_that_would_ignore_a_contract_refuses_it(
    any_server: Server, route: str, body: Any
) -> None:
    answer = any_server.post(route, {**body, "exact_weight_version": "v0"})
    assert answer["status_code"] == 400
    assert "exact_weight_version" in str(answer)


def test_contract_in_custom_params_is_kept_on_other_routes(any_server: Server) -> None:
    """Requests of these routes wait behind the route, and are refused with its own error."""
    body = {"parameters": {"sampling_params": {"custom_params": {"min_epoch": 10**6, **AT_ONCE}}}}
    answer = any_server.post("/vertex_generate", {"instances": [{"text": "t300"}], **body})
    assert answer["status_code"] == 503, answer
    assert "min_epoch" in str(answer)


@pytest.mark.parametrize("place", ["top", "inner"])
def test_wrong_contract_is_named(any_server: Server, place: str) -> None:
    for name, value in (("min_weight_version", "v1"), ("exact_weight_version", 5)):
        fields: dict[str, Any] = {name: value}
        if place == "inner":
            fields = {"sampling_params": {**SAMPLING, "custom_params": fields}}
        answer = post(any_server, "/generate", **fields)
        assert answer.status_code == 400
        assert name in answer.text
    both = {**SAMPLING, "custom_params": {"min_epoch": 1}}
    answer = post(any_server, "/generate", sampling_params=both, min_epoch=2)
    assert answer.status_code == 400
    answer = post(any_server, "/generate", min_adapter_version=1)
    assert answer.status_code == 400
    assert "adapter" in answer.text


def test_commit_ends_a_beam_search_whose_contract_it_breaks(
    any_server: Server, checkpoints: Path
) -> None:
    pause(any_server, "in_place")
    (searching,) = start(
        any_server, 1, tokens=4, stream=False, exact_weight_version="v0",
        sampling={"beam_width": 2},
    )  # fmt: skip
    until_waiting(any_server, 1)
    update(any_server, checkpoints, 1, kv_cache="keep")
    resume(any_server)
    searching.wait_for_end()
    assert searching.status == 503
    assert "exact_weight_version is 'v0'" in (searching.refusal or "")
