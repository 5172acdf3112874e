"""Given tokens on servers of several ranks, which sample them on one or on all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.marker import build_stages, token
from harness.server import Server
from tests.extensions.forced.test_forced import LIVE, emit, expect_emitted, expect_own_tokens
from tests.support.load import pause, prompt, resume, update, versions_of
from tests.support.plugins import with_plugin
from tests.support.pool import CHUNK, FLAVOURS, MAX_RUNNING, Flavour, ServerPool

_COMMON = (
    "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(MAX_RUNNING),
    "--weight-version", "v0",
)  # fmt: skip


# a step of several ranks takes ten times as long as one of a single rank
LONG = 40


def build(folder: Path) -> Path:
    return build_stages(folder, 0)


FLAVOURS |= {
    "forced_ranks": Flavour((*_COMMON, "--tp-size", "2"), model=build),
    "forced_stages": Flavour(
        (*_COMMON, "--pp-size", "2", "--pp-async-batch-depth", "1"), model=build
    ),
    "forced_attention_dp": Flavour(
        (*_COMMON, "--tp-size", "2", "--attn-dp-size", "2"),
        with_plugin("attention_dp"),
        model=build,
    ),
}


@pytest.fixture(params=["forced_ranks", "forced_stages", "forced_attention_dp"])
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


def test_requests_of_all_ranks_emit_their_own_tokens(server: Server) -> None:
    expect_own_tokens(server, 5, 30, 41, 17)


def test_given_tokens_go_on_across_a_retraction_and_a_commit(
    server: Server, tmp_path: Path
) -> None:
    tokens = prompt(LONG)
    generation = emit(server, tokens, 5, input_ids=prompt(CHUNK + 9))
    generation.wait_for_tokens(3)
    pause(server, "retract")
    build_stages(tmp_path / "v1", 1)
    update(server, tmp_path, 1, kv_cache="recompute", **LIVE)
    resume(server)
    output = expect_emitted(generation, tokens)
    assert output.tokens[len(tokens) :] == 5 * [token(1)]
    assert versions_of(output) == ["v0", "v1"]
