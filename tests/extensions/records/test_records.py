"""Each recorded quantity of a token comes from the forward that sampled the token.

Expected are the values that a server of the token's version alone returns for the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support import routed
from tests.support.load import ask, labels_of, pause, prompt, resume, update
from tests.support.pool import FLAVOURS, Flavour, ServerPool, restore
from tests.support.records import (
    EVERYTHING,
    SAMPLING,
    SERVING,
    Chunks,
    ask_for,
    ask_for_routes,
    expect_same,
    routes_of,
    single_version,
    tokens_of,
)

COMMITS = 10
# versions whose tokens are compared with a server started with them
STARTED = ("v0", "v5", f"v{COMMITS}")
PROMPT_TOKENS = 24
# tokens of a request ended by its test
ENDLESS = 2000
# decode steps between two retractions that SGLang simulates for lack of memory
STEPS = 3


def base(folder: Path) -> Path:
    return routed.build(folder, 0)


# small chunks split the later prefills of a retracted request
_COMMON = Flavour((*SERVING, "--weight-version", "v0", "--chunked-prefill-size", "32"), model=base)
# with overlap a stream comes in increments, and without it each chunk repeats all tokens so far
INCREMENTS, REPEATS = "records", "records_normal_loop"
SHORT_OF_MEMORY, RANKS = "records_short_of_memory", "records_ranks"
FLAVOURS[INCREMENTS] = replace(
    _COMMON, flags=(*_COMMON.flags, "--incremental-streaming-output", "--stream-interval", "3")
)
FLAVOURS[REPEATS] = replace(_COMMON, flags=(*_COMMON.flags, "--disable-overlap-schedule"))
FLAVOURS[SHORT_OF_MEMORY] = replace(
    _COMMON, env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(STEPS)}
)
FLAVOURS[RANKS] = replace(_COMMON, flags=(*_COMMON.flags, "--tp-size", "2"))
BOTH = [INCREMENTS, REPEATS]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints v0, v1, … v10."""
    folder = tmp_path_factory.mktemp("routed")
    for version in range(COMMITS + 1):
        routed.build(folder / f"v{version}", version)
    return folder


@pytest.fixture
def server(flavour: str, pool: ServerPool, versions: Path) -> Iterator[Server]:
    server = pool.get(FLAVOURS[flavour])
    yield server
    # a failed test ends its server
    if server.is_alive():
        restore(server, versions / "v0")


def begin(server: Server, flavour: str, tokens: int = ENDLESS, **fields: Any) -> Chunks:
    is_incremental = flavour == INCREMENTS
    return Chunks(server, prompt(PROMPT_TOKENS), tokens, increments=is_incremental, **fields)


def recompute(server: Server, versions: Path, version: int) -> None:
    """Commit between two known tokens."""
    pause(server, "in_place")
    update(server, versions, version, non_blocking=True, kv_cache="recompute")
    resume(server)


# serves one version, by its name, and no other request
Alone = Callable[[str], AbstractContextManager[Server]]


@pytest.fixture
def started_alone(versions: Path, tmp_path: Path, alone: Alone) -> Alone:
    """A server that was started with the version, for three of them: starts take long."""

    def at(name: str) -> AbstractContextManager[Server]:
        if name not in STARTED:
            return alone(name)
        return single_version(versions / name, tmp_path / f"{name}.log")

    return at


@pytest.fixture(scope="module")
def alone(versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """A server that is updated to each version while it has no request."""
    with single_version(versions / "v0", tmp_path_factory.mktemp("alone") / "log") as server:

        @contextmanager
        def at(name: str) -> Iterator[Server]:
            update(server, versions, int(name.removeprefix("v")))
            yield server

        yield at


def expect_single_versions(content: dict[str, Any], prompt: list[int], alone: Alone) -> None:
    """Compare each token with a server of the token's version."""
    tokens, meta = content["output_ids"], content["meta_info"]
    found = tokens_of(content, len(prompt))
    made_by = labels_of(meta["weight_versions"])
    assert len(made_by) == len(tokens)
    assert meta["records"] == "sampled"
    for version in dict.fromkeys(made_by):
        own = [index for index, label in enumerate(made_by) if label == version]
        with alone(version) as server:
            for index, expected in zip(own, ask_for(server, prompt, tokens, own), strict=True):
                expect_same(found[index], expected, f"token {index} by {version}")
            if own[0] == 0:
                expected_routes = ask_for_routes(server, prompt)
                assert routes_of(meta)[: len(prompt)].tolist() == expected_routes


@pytest.mark.parametrize("flavour", BOTH[:1])
def test_records_are_those_of_servers_of_one_version(
    server: Server, flavour: str, versions: Path, started_alone: Alone
) -> None:
    expect_records_across(server, flavour, COMMITS, versions, started_alone)


@pytest.mark.parametrize(("flavour", "commits"), [(BOTH[1], COMMITS), (RANKS, 2)])
def test_records_are_those_of_each_tokens_own_version(
    server: Server, flavour: str, commits: int, versions: Path, alone: Alone
) -> None:
    expect_records_across(server, flavour, commits, versions, alone)


def expect_records_across(
    server: Server, flavour: str, commits: int, versions: Path, alone: Alone
) -> None:
    asked = begin(server, flavour)
    for version in range(1, commits + 1):
        asked.wait_for_tokens(asked.count + 3)
        recompute(server, versions, version)
        asked.wait_for_version(f"v{version}")
    asked.wait_for_tokens(asked.count + 4)
    asked.abort()
    content = asked.whole()
    assert content["meta_info"]["num_retractions"] == commits
    assert len(set(labels_of(content["meta_info"]["weight_versions"]))) == commits + 1
    expect_single_versions(content, asked.prompt, alone)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("flavour", BOTH)
def test_request_aborted_in_the_queue_has_the_records_of_all_its_tokens(
    server: Server, flavour: str, alone: Alone, stream: bool
) -> None:
    asked = begin(server, flavour, stream=stream)
    guide = begin(server, flavour)
    guide.wait_for_tokens(4)
    pause(server, "retract")
    resume(server)
    guide.wait_for_tokens(guide.count + 4)
    pause(server, "retract")
    asked.abort()
    content = asked.whole()
    assert content["meta_info"]["finish_reason"]["type"] == "abort"
    assert content["meta_info"]["num_retractions"] > 0
    expect_single_versions(content, asked.prompt, alone)
    resume(server)
    guide.wait_for_tokens(guide.count + 4)
    guide.abort()
    expect_single_versions(guide.whole(), guide.prompt, alone)


@pytest.mark.parametrize("flavour", [SHORT_OF_MEMORY])
def test_records_survive_a_lack_of_memory(server: Server, flavour: str, alone: Alone) -> None:
    all_asked = [begin(server, flavour, tokens=20, stream=False) for _ in range(4)]
    contents = [asked.whole() for asked in all_asked]
    assert any(content["meta_info"]["num_retractions"] for content in contents)
    for asked, content in zip(all_asked, contents, strict=True):
        expect_single_versions(content, asked.prompt, alone)


@pytest.mark.parametrize("end", ["running", "queued"])
@pytest.mark.parametrize("flavour", BOTH)
def test_recomputed_records_describe_the_kv_in_use(
    server: Server, flavour: str, versions: Path, alone: Alone, end: str
) -> None:
    asked = begin(server, flavour, sampling_params={"custom_params": {"records": "recomputed"}})
    for version in 1, 2:
        asked.wait_for_tokens(asked.count + 3)
        recompute(server, versions, version)
        asked.wait_for_version(f"v{version}")
    asked.wait_for_tokens(asked.count + 4)
    if end == "queued":
        pause(server, "retract")
    asked.abort()
    content = asked.whole()
    meta, tokens = content["meta_info"], content["output_ids"]
    assert meta["records"] == "recomputed"
    # each token's own quantities stay those of its forward
    tokens_of(content, PROMPT_TOKENS)
    with alone("v2") as updated:
        assert routes_of(meta).tolist() == ask_for_routes(updated, asked.prompt + tokens[:-1])


@pytest.mark.parametrize("flavour", BOTH[:1])
def test_first_token_on_an_older_prefix_has_the_routes_of_its_own_forward(
    server: Server, flavour: str, versions: Path
) -> None:
    """The prompt's last position is computed again, and its slot then replaced by the older one."""
    body = {"input_ids": prompt(PROMPT_TOKENS), "sampling_params": SAMPLING, **EVERYTHING}

    def rows(tokens: int) -> list[Any]:
        sampling = SAMPLING | {"max_new_tokens": tokens}
        meta = ask(server, "POST", "/generate", body | {"sampling_params": sampling})["meta_info"]
        return routes_of(meta).tolist()[:PROMPT_TOKENS]

    older = rows(4)
    update(server, versions, 1, kv_cache="keep")
    # a request that ends with its prefill keeps its own slots
    own = rows(1)
    assert own[:-1] == older[:-1]
    assert own[-1] != older[-1]
    assert rows(4) == own


@pytest.mark.parametrize("records", ["original", 1, ["sampled"]])
@pytest.mark.parametrize("flavour", BOTH[:1])
def test_unknown_records_are_refused(server: Server, flavour: str, records: Any) -> None:
    sampling = {"max_new_tokens": 1, "custom_params": {"records": records}}
    answer = server.post("/generate", {"input_ids": prompt(), "sampling_params": sampling})
    assert answer["status_code"] == 400, answer
    assert "records" in str(answer)


@pytest.mark.parametrize("flavour", BOTH[:1])
def test_answer_without_routes_names_no_records(server: Server, flavour: str) -> None:
    sampling = {"max_new_tokens": 2, "custom_params": {"records": "sampled"}}
    body = {"input_ids": prompt(), "sampling_params": sampling}
    assert "records" not in ask(server, "POST", "/generate", body)["meta_info"]
