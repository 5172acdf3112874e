"""vLLM's aborts by name."""

from __future__ import annotations

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_all_go_on,
    more_tokens,
)
from tests.support.vllm import VLLMClient
from tests.test_aborts import expect_only_the_second_to_end, start_named

pytest_plugins = ["tests.support.fixtures"]


def test_vllm_abort_counts_the_requests_it_ended(vllm_server: Server, vllm: VLLMClient) -> None:
    group = Generation(vllm_server, tokens=ENDLESS, rid="group", n=3)
    group.wait_for_tokens(3)
    named = start_named(vllm_server)
    more_tokens(named)
    assert vllm.post("/abort_requests", {"request_ids": ["gro", "other"]})["aborted"] == 0
    answer = vllm.post("/abort_requests", {"request_ids": ["group", "step1", "step1"]})
    assert answer["aborted"] == 4
    assert [output.finish_reason for output in group.outputs()] == ["abort"] * 3
    expect_only_the_second_to_end(named)
    expect_all_go_on([named[0], named[2]])
