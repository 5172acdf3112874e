"""Versions of tokens and KV in requests through a prefill server and a decode server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import (
    ask,
    labels_of,
    prompt,
    start,
    until,
)
from tests.support.metrics import read
from tests.support.pair import Pair, expect_labels, live, versions_by_tokens


def test_request_passes_through_both_servers(pair: Pair) -> None:
    generation = pair.generate(tokens=20)
    output = generation.output()
    assert output.finish_reason == "length"
    assert labels_of(output.meta["weight_versions"]) == ["v0"] * 20


def mismatches(pair: Pair) -> float:
    return read(pair.decode).get("prefill_mismatched_requests_total", 0.0)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0), (1, 1)])
def test_prompt_and_first_token_have_the_prefill_servers_version(
    pair: Pair, checkpoints: Path, prefill: int, decode: int
) -> None:
    """Other tokens have the decode server's version."""
    before = mismatches(pair)
    for server, version in zip(pair.servers, (prefill, decode), strict=True):
        if version:
            live(server, checkpoints, version)
    generation = pair.generate(tokens=20, input_ids=prompt(40))
    output = generation.output()
    assert versions_by_tokens(output) == [f"v{prefill}"] + [f"v{decode}"] * 19
    expect_labels(output, prompt_by=[f"v{prefill}"] * 40)
    prefilled = generation.prefill.output()
    assert labels_of(prefilled.meta["weight_versions"]) == [f"v{prefill}"]
    assert labels_of(prefilled.meta["kv_versions"]) == [f"v{prefill}"] * 40
    assert mismatches(pair) - before == (prefill != decode)


def test_spans_are_exact_across_updates_on_both_servers(pair: Pair, checkpoints: Path) -> None:
    generation = pair.generate(tokens=2000, input_ids=prompt(40))
    for version in (1, 2):
        generation.wait_for_tokens(generation.count + 3)
        for server in pair.servers:
            live(server, checkpoints, version)
    generation.wait_for_tokens(generation.count + 3)
    generation.abort()
    output = generation.output()
    expect_labels(output, prompt_by=["v0"] * 40)
    assert set(versions_by_tokens(output)) == {"v0", "v1", "v2"}


def test_prompt_of_two_versions_keeps_its_kv_versions(pair: Pair, checkpoints: Path) -> None:
    """One part was in the prefill server's cache, and for some pairs in the decode server's."""
    input_ids = prompt(96)
    pair.generate(tokens=2, input_ids=input_ids[:64]).output()
    for server in pair.servers:
        live(server, checkpoints, 1, kv="keep")
    output = pair.generate(tokens=8, input_ids=input_ids).output()
    assert versions_by_tokens(output) == ["v1"] * 8
    expect_labels(output, prompt_by=["v0"] * 64 + ["v1"] * 32)


def test_prefix_in_the_decode_servers_cache_keeps_its_kv_versions(
    pair: Pair, checkpoints: Path
) -> None:
    """The transfer skips that prefix, so its KV keeps its version."""
    input_ids = prompt(96)
    pair.generate(tokens=2, input_ids=input_ids[:64]).output()
    live(pair.prefill, checkpoints, 1, kv="fence")
    output = pair.generate(tokens=8, input_ids=input_ids).output()
    assert versions_by_tokens(output) == ["v1"] + ["v0"] * 7
    own = 64 if serves_prefixes(pair.decode) else 0
    expect_labels(output, prompt_by=["v0"] * own + ["v1"] * (96 - own))


def serves_prefixes(server: Server) -> bool:
    return not ask(server, "GET", "/server_info")["disable_radix_cache"]


def waiting(server: Server) -> int:
    (load,) = ask(server, "GET", "/v1/loads")["loads"]
    return int(load["num_waiting_reqs"])


def test_fence_applies_to_a_request_waiting_for_its_decode_server(
    pair: Pair, checkpoints: Path
) -> None:
    """The request came before the fence but has not begun."""
    input_ids = prompt(64)
    pair.generate(tokens=2, input_ids=input_ids).output()
    request: dict[str, Any] = {"tokens": 8, "input_ids": input_ids, **pair.meeting()}
    start(pair.prefill, 1, **request)
    until("it waits there", lambda: waiting(pair.prefill) == 1)
    for server in pair.servers:
        live(server, checkpoints, 1, kv="fence")
    (generation,) = start(pair.decode, 1, **request)
    output = generation.output()
    assert output.meta["cached_tokens"] == 0
    expect_labels(output, prompt_by=["v1"] * 64)
