"""A request gets the weights it asks for, or a refusal that says what is served."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from harness.server import PLAIN, Server
from tests.support.load import prompt

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


def post(server: Server, route: str, **fields: Any) -> httpx.Response:
    body = {**BODIES[route], **fields}
    return httpx.post(server.url + route, json=body, timeout=60, **PLAIN)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", BODIES)
def test_contract_at_the_top_level_is_ignored_by_no_route(
    vllm_server: Server, route: str, stream: bool
) -> None:
    answer = post(vllm_server, route, stream=stream, min_epoch=-1)
    assert answer.status_code == 400
    assert "min_epoch" in answer.text
    assert post(vllm_server, route, stream=stream, min_epoch=0).status_code == 200
