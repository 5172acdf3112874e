"""Given tokens have the records that sampled ones have, number for number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.server import Server
from tests.support import routed
from tests.support.load import ask, prompt
from tests.support.pool import FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.records import EVERYTHING, LISTED, LISTS, SAMPLING, SERVING

LENGTH, TOKENS = 24, 30
LOOPS = add_both_loops(
    "forced_records",
    Flavour(
        (*SERVING, "--weight-version", "v0", "--chunked-prefill-size", "32"),
        model=lambda folder: routed.build(folder, 0),
    ),
)


@pytest.fixture(params=LOOPS)
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


def generate(server: Server, input_ids: list[int], **sampling: Any) -> Any:
    """Generate with every record, and without a cached prefix, whose rows would be older."""
    assert server.post("/flush_cache?timeout=60")["status_code"] == 200
    body = {
        "input_ids": input_ids,
        "sampling_params": SAMPLING | {"max_new_tokens": TOKENS} | sampling,
        "token_ids_logprob": LISTED,
        **EVERYTHING,
    }
    return ask(server, "POST", "/generate", body)


def test_given_tokens_have_the_records_of_sampled_ones(server: Server) -> None:
    input_ids = prompt(LENGTH)
    sampled = generate(server, input_ids)
    tokens = sampled["output_ids"]
    given = generate(server, input_ids, custom_params={"forced_token_ids": tokens})
    assert given["output_ids"] == tokens
    for name in (*LISTS, "routed_experts", "hidden_states"):
        assert given["meta_info"][name] == sampled["meta_info"][name], name


def test_token_outside_of_its_mask_ends_its_request_alone(server: Server) -> None:
    input_ids = prompt(LENGTH)
    sampled = generate(server, input_ids)
    tokens = sampled["output_ids"]
    masks = sampled["meta_info"]["output_token_sampling_mask"]
    tokens[3] = next(token for token in range(routed.CONFIG["vocab_size"]) if token not in masks[3])  # type: ignore[call-overload]
    other = generate(server, prompt(LENGTH))
    body = {
        "input_ids": input_ids,
        "sampling_params": SAMPLING | {"custom_params": {"forced_token_ids": tokens}},
        **EVERYTHING,
    }
    answer = server.post("/generate", body)
    assert (
        answer.get("status_code") == 500 or answer["meta_info"]["finish_reason"]["type"] == "abort"
    )
    assert len(other["output_ids"]) == TOKENS
    assert len(generate(server, prompt(LENGTH))["output_ids"]) == TOKENS
