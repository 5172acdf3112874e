"""A failed control call of SGLang's own is an error for its caller, and harms nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import Server, for_the_answer, free_port
from harness.starting import UPSTREAM
from tests.support.engine import run_script
from tests.support.load import (
    ENDLESS,
    expect_aborted,
    pause,
    requests_run_on,
    resume,
    start_running,
)
from tests.support.pool import ServerPool
from tests.support.updates import refuse

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.mark.guards_fix
@pytest.mark.parametrize(
    ("path", "body", "status_code", "words"),
    [
        (RELEASE, {}, 409, ["2 requests run", "pause"]),
        (RESUME, {}, 409, ["not released", "kv_cache"]),
        (RESUME, {"tags": ["kv_cache"]}, 409, ["not released", "kv_cache"]),
        (RESUME, {"tags": ["heap"]}, 400, ["heap", "kv_cache, weights"]),
        ("/stop_expert_distribution_record", None, 500, ["ExpertDistributionReq"]),
        ("/start_profile", {"activities": ["RPD"]}, 500, ["ProfileReq", "rpdTracerControl"]),
        ("/slow_down", {"forward_sleep_time": 1e300}, 400, ["forward_sleep_time"]),
    ],
    ids=["release", "resume", "resume one", "no such tag", "experts", "profile", "slow down"],
)
def test_failing_handler_answers_with_the_error(
    server: Server, path: str, body: Any, status_code: int, words: list[str]
) -> None:
    with requests_run_on(server):
        refuse(server.post(path, body), *words, status_code=status_code)


@pytest.mark.guards_fix
def test_release_is_refused_while_paused_in_place(server: Server) -> None:
    with requests_run_on(server):
        pause(server, "in_place")
        refuse(server.post(RELEASE, {}), "2 requests run", status_code=409)
        resume(server)


def test_release_and_resume_work_in_order(server: Server) -> None:
    """A retracted request keeps neither call from working."""
    with requests_run_on(server):
        pause(server, "retract")
        assert server.post(RELEASE, {})["status_code"] == 200
        answer = server.post(RELEASE, {"tags": ["weights"]})
        refuse(answer, "already", "weights", status_code=409)
        assert server.post(RESUME, {})["status_code"] == 200
        refuse(server.post(RESUME, {}), "not released", status_code=409)
        resume(server)


def test_release_works_when_all_requests_have_ended(server: Server) -> None:
    """Ended requests stay in SGLang's batch until the next step, and a frozen loop makes none."""
    for _ in range(5):
        running = start_running(server, 2, tokens=ENDLESS)
        server.post("/abort_request", {"abort_all": True})
        pause(server, "in_place")
        answer = server.post(RELEASE, {"tags": ["kv_cache"]})
        assert answer["status_code"] == 200, answer
        assert server.post(RESUME, {"tags": ["kv_cache"]})["status_code"] == 200
        resume(server)
        for generation in running:
            expect_aborted(generation)
    with requests_run_on(server):
        pass


@pytest.mark.parametrize(
    ("path", "body", "status_code"),
    [
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 400),
        ("/unload_lora_adapter", {"lora_name": "a"}, 400),
        ("/weights_checker", {"action": "guess"}, 400),
        ("/get_weights_by_name", {"name": "no.such.weight"}, 400),
        ("/send_weights_to_remote_instance", {"master_address": "127.0.0.1", "ports": "x"}, 400),
        ("/hicache/storage-backend/clear", None, 400),
        ("/pd_role_switch", {"new_role": "decode"}, 400),
        ("/scale_elastic_ep", {"new_ep_size": -3}, 400),
        ("/stop_profile", None, 500),
        ("/close_session", {"session_id": 7}, 400),
    ],
    ids=lambda value: value.strip("/") if isinstance(value, str) else "",
)
def test_bad_control_call_leaves_requests_running(
    server: Server, path: str, body: Any, status_code: int
) -> None:
    with requests_run_on(server):
        assert server.post(path, body)["status_code"] == status_code


def test_bad_session_calls_leave_requests_running(server: Server) -> None:
    """Sessions opened twice, closed without being open, and asked for missing requests."""
    session = {"capacity_of_str_len": 1000, "session_id": "s"}
    with requests_run_on(server):
        assert server.post("/open_session", session)["status_code"] == 200
        assert server.post("/open_session", session)["status_code"] == 400
        for params, status_code in (
            ({"id": "none"}, 400),
            ({"id": "s", "rid": "none"}, 400),
            # without an earlier turn there is nothing to cut off
            ({"id": "s", "offset": -999}, 200),
        ):
            body = {"input_ids": [5], "session_params": params}
            answer = server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 2}})
            assert answer["status_code"] == status_code, answer
        for session_id in ("s", "s", "none"):
            assert server.post("/close_session", {"session_id": session_id})["status_code"] == 200


@pytest.mark.guards_fix
def test_rendezvous_without_a_peer_blocks_only_its_caller(server: Server) -> None:
    """The caller may wait for half an hour."""
    body = {
        "master_address": "127.0.0.1",
        "ports": str(free_port()),
        "group_rank": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    with requests_run_on(server) as running:
        with pytest.raises(httpx.ReadTimeout):
            server.post(
                "/init_weights_send_group_for_remote_instance", body, timeout=for_the_answer(0.5)
            )
        pause(server, "in_place")
        resume(server)
        for generation in running:
            generation.wait_for_tokens(generation.count + 3)


class TestEngine:
    @pytest.fixture(scope="class")
    def answers(
        self, pool: ServerPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> dict[str, Any]:
        pool.discard()
        folder = tmp_path_factory.mktemp("containment")
        plugins = {"SGLANG_PLUGINS": "inflight_reference"} if UPSTREAM else {}
        answers: dict[str, Any] = run_script(
            "tests.support.engine_containment", checkpoints / "v0", folder, plugins
        )
        return answers

    @pytest.mark.guards_fix
    def test_late_answer_does_not_reach_the_next_caller(self, answers: dict[str, Any]) -> None:
        assert "second" in answers["check"]
        assert answers["flush"] == [False, "Another flush_cache is already in progress."]

    @pytest.mark.guards_fix
    def test_failing_handler_raises(self, answers: dict[str, Any]) -> None:
        kind, message = answers["release"]
        assert kind == "Conflict"
        assert "1 requests run" in message
        assert answers["tokens"] == [marker.token(0)] * 400

    @pytest.mark.skipif(UPSTREAM, reason="its scheduler would end, and the other tests with it")
    def test_bad_request_is_refused(self, answers: dict[str, Any]) -> None:
        fields = (
            "position 1",
            "sampling_params.ignore_eos",
            "token_ids_logprob",
            "session_params.id",
            "return_logprob",
        )
        for said, field in zip(answers["refused"], fields, strict=True):
            assert field in said, answers["refused"]
        assert answers["tokens"] == [marker.token(0)] * 400
