"""The log-probability of each token follows from its own weights and its own KV.

The first layers of a real model run in float32 at temperature 1. The reference is transformers with
the same weights and the same mix of KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.stories import smollm2
from harness.server import Server, serve
from sglang_inflight.cache import default_cache
from tests.support.load import (
    Generation,
    ask,
    labels_of,
    pause,
    resume,
    settle,
    until_made_by,
)
from tests.support.memory_release import release, resume_memory
from tests.support.pool import ServerPool
from tests.support.replay import Replay
from tests.support.updates import by_reference

# three of the model's 30 layers and a part of its words: equally real, and much less work
LAYERS = 3
WORDS = 8192
PROMPT = list(range(1000, 1040))
TOKENS = 32
# tokens of a request ended by its test
LONG = 1000
REUSED = 24
# nats between two float32 computations; versions differ by thousands of times that
CLOSE = 2e-3

Versions = dict[str, Path]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Build SmolLM2's head in float32, and a copy with a tenth of noise on each weight."""
    base = smollm2.build_base(default_cache())
    folder = tmp_path_factory.mktemp("smollm2")
    stored = load_file(base / "model.safetensors")
    weights = {
        name: tensor[:WORDS].float() if "embed_tokens" in name else tensor.float()
        for name, tensor in stored.items()
        if _is_kept(name)
    }
    fewer = {"num_hidden_layers": LAYERS, "vocab_size": WORDS}
    config = json.loads((base / "config.json").read_text()) | fewer
    noise = torch.Generator().manual_seed(0)
    noisy = {n: t * (1 + 0.1 * torch.randn(t.shape, generator=noise)) for n, t in weights.items()}
    found = {}
    for name, tensors in (("v0", weights), ("v1", noisy)):
        found[name] = folder / name
        found[name].mkdir()
        for file in base.iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                (found[name] / file.name).symlink_to(file)
        (found[name] / "config.json").write_text(json.dumps(config))
        save_file(tensors, found[name] / "model.safetensors", metadata={"format": "pt"})
    return found


def _is_kept(name: str) -> bool:
    layer = re.search(r"layers\.(\d+)", name)
    return layer is None or int(layer[1]) < LAYERS


# the name of a flavour, such as ``replay``, would part these tests from the others of their server
@pytest.fixture(scope="module")
def reference(versions: Versions) -> Replay:
    return Replay(versions)


@pytest.fixture(scope="module")
def real_server(
    versions: Versions, pool: ServerPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pool.discard()  # one server at a time
    flags = (
        "--dtype", "float32",
        "--weight-version", "v0",
        "--max-total-tokens", "4096",
        "--enable-memory-saver",
    )  # fmt: skip
    # unpaced, so that the update ends before the request
    env = {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": "0"}
    log = tmp_path_factory.mktemp("logs") / "real.log"
    with serve(versions["v0"], *flags, log=log, env=env) as server:
        yield server


@pytest.fixture
def real(real_server: Server, versions: Versions) -> Iterator[Server]:
    yield real_server
    update(real_server, versions, "v0", kv_cache="recompute")


def update(real: Server, versions: Versions, version: str, **fields: Any) -> None:
    body = {"model_path": str(versions[version]), "weight_version": version, **fields}
    receipt = ask(real, "POST", "/update_weights_from_disk", {**body, "non_blocking": True})
    assert receipt["success"], receipt


def generate(
    real: Server, tokens: int = TOKENS, prompt: list[int] = PROMPT, temperature: float = 1.0
) -> Any:
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    return ask(real, "POST", "/generate", body)


def begun(real: Server) -> Generation:
    """Begin a request whose log-probabilities are compared, and which its test ends."""
    sampling = {"temperature": 1.0}
    generation = Generation(
        real, tokens=LONG, input_ids=PROMPT, sampling=sampling, return_logprob=True
    )
    generation.wait_for_tokens(3)
    return generation


def ended(generation: Generation) -> Any:
    generation.abort()
    output = generation.output()
    return {"output_ids": output.tokens, "meta_info": output.meta}


def generate_across(real: Server, versions: Versions, kv_cache: str) -> Any:
    """Generate across a commit: first tokens by v0, last tokens by v1."""
    generation = begun(real)
    update(real, versions, "v1", kv_cache=kv_cache)
    until_made_by(generation, 1)
    return ended(generation)


def expect_logprobs(answer: Any, reference: Replay, kv: list[str] | None = None) -> None:
    meta = answer["meta_info"]
    output = answer["output_ids"]
    returned = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    expected = reference.logprobs(
        PROMPT, output, labels_of(meta["weight_versions"]), kv or labels_of(meta["kv_versions"])
    )
    assert len(returned) == len(expected) == len(output)
    for index, (ours, theirs) in enumerate(zip(returned, expected, strict=True)):
        assert abs(ours - theirs) < CLOSE, f"token {index}: {ours}, expected {theirs}: {meta}"


def test_update_accepts_a_tied_head_beside_the_embeddings(real: Server, versions: Versions) -> None:
    """A checkpoint holds the embeddings only, a trainer's ``state_dict()`` both names."""
    embeddings = load_file(versions["v1"] / "model.safetensors")["model.embed_tokens.weight"]
    both = [("model.embed_tokens.weight", embeddings), ("lm_head.weight", embeddings)]
    body = {"serialized_named_tensors": [by_reference(both)], "non_blocking": True}
    receipt = ask(real, "POST", "/update_weights_from_tensor", {**body, "weight_version": "v2"})
    assert (receipt["weight_version"], receipt["tensors"]) == ("v2", 2)


def test_logprobs_match_the_reference_without_an_update(real: Server, reference: Replay) -> None:
    answer = generate(real)
    assert set(labels_of(answer["meta_info"]["weight_versions"])) == {"v0"}
    expect_logprobs(answer, reference)


def test_reference_tells_versions_apart(real: Server, reference: Replay) -> None:
    """Otherwise the other tests would prove nothing."""
    answer = generate(real)
    kv = labels_of(answer["meta_info"]["kv_versions"])
    with pytest.raises(AssertionError, match="token"):
        expect_logprobs(answer, reference, kv=["v1"] * (len(PROMPT) // 2) + kv[len(PROMPT) // 2 :])


@pytest.mark.parametrize("kv_cache", ["fence", "keep"])
def test_logprobs_match_across_a_commit_with_old_kv(
    real: Server, versions: Versions, reference: Replay, kv_cache: str
) -> None:
    answer = generate_across(real, versions, kv_cache)
    assert set(labels_of(answer["meta_info"]["weight_versions"])) == {"v0", "v1"}
    assert set(labels_of(answer["meta_info"]["kv_versions"])) == {"v0", "v1"}
    expect_logprobs(answer, reference)


def test_logprobs_match_across_a_commit_with_recomputed_kv(
    real: Server, versions: Versions, reference: Replay
) -> None:
    """A token from before the commit keeps its log-probability."""
    answer = generate_across(real, versions, "recompute")
    meta = answer["meta_info"]
    made_by = labels_of(meta["weight_versions"])
    assert set(made_by) == {"v0", "v1"}
    assert set(labels_of(meta["kv_versions"])) == {"v1"}
    returned = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    for version in ("v0", "v1"):
        kv = [version] * (len(PROMPT) + len(made_by) - 1)
        expected = reference.logprobs(PROMPT, answer["output_ids"], [version] * len(made_by), kv)
        mine = [i for i, label in enumerate(made_by) if label == version]
        for index in mine:
            assert abs(returned[index] - expected[index]) < CLOSE, (index, meta)


def test_logprobs_match_after_a_reused_old_prefix(
    real: Server, versions: Versions, reference: Replay
) -> None:
    generate(real, tokens=1, prompt=PROMPT[:REUSED])
    update(real, versions, "v1", kv_cache="keep")
    answer = generate(real)
    assert answer["meta_info"]["cached_tokens"] == REUSED
    assert set(labels_of(answer["meta_info"]["weight_versions"])) == {"v1"}
    assert set(labels_of(answer["meta_info"]["kv_versions"])) == {"v0", "v1"}
    expect_logprobs(answer, reference)


def test_logprobs_match_behind_a_fence(real: Server, versions: Versions, reference: Replay) -> None:
    generate(real, tokens=1, prompt=PROMPT[:REUSED])
    update(real, versions, "v1", kv_cache="fence")
    answer = generate(real)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert set(labels_of(answer["meta_info"]["kv_versions"])) == {"v1"}
    expect_logprobs(answer, reference)


@pytest.mark.parametrize(
    ("mode", "goes", "keep", "served"),
    [
        ("retract", ("kv_cache", "weights", "cuda_graph"), "discard", "v1"),
        ("in_place", ("weights",), "host", "v0"),
        ("retract", (), "awake", "v1"),
    ],
)
def test_logprobs_match_across_a_memory_release(
    real: Server, versions: Versions, mode: str, goes: tuple[str, ...], keep: str, served: str
) -> None:
    """Expect a frozen request to equal two requests on unreleased memory: one by v0, and one by the
    later version from the first one's tokens on.
    """
    prompts = [PROMPT, PROMPT[::-1]]
    assert real.post("/flush_cache?timeout=60")["status_code"] == 200
    frozen = [Generation(real, tokens=LONG, input_ids=p, return_logprob=True) for p in prompts]
    for generation in frozen:
        generation.wait_for_tokens(3)
    pause(real, mode)
    counts = settle(real, frozen)
    if goes:
        release(real, *goes, keep_weights=keep)
        resume_memory(real, "weights")
    if served == "v1":
        update(real, versions, "v1", partial=False)
    if others := [kind for kind in goes if kind != "weights"]:
        resume_memory(real, *others)
    resume(real)
    for generation, count in zip(frozen, counts, strict=True):
        generation.wait_for_tokens(count + 8)
        generation.abort()
    outputs = [generation.output() for generation in frozen]
    after = [
        most_likely(real, prompt + output.tokens[:count], len(output.tokens) - count)
        for prompt, count, output in zip(prompts, counts, outputs, strict=True)
    ]
    update(real, versions, "v0")
    before = [most_likely(real, p, count) for p, count in zip(prompts, counts, strict=True)]
    for output, first, then in zip(outputs, before, after, strict=True):
        spans = labels_of(output.meta["weight_versions"])
        assert spans == ["v0"] * len(first) + [served] * len(then)
        assert set(labels_of(output.meta["kv_versions"])) == {served}
        assert output.tokens == [token for token, _ in first + then]
        returned = [logprob for logprob, *_ in output.meta["output_token_logprobs"]]
        for index, (_, logprob) in enumerate(first + then):
            assert abs(returned[index] - logprob) < CLOSE, (index, returned, first, then)


def most_likely(real: Server, prompt: list[int], tokens: int) -> list[tuple[int, float]]:
    """Generate greedily from an empty cache, and return each token with its log-probability."""
    assert real.post("/flush_cache?timeout=60")["status_code"] == 200
    answer = generate(real, tokens, prompt, temperature=0.0)
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    return list(zip(answer["output_ids"], logprobs, strict=True))


def test_logprobs_match_when_kv_is_kept_for_one_commit(
    real: Server, versions: Versions, reference: Replay
) -> None:
    """Under the bound 1 the second commit recomputes the KV, and the third one keeps it."""
    generation = begun(real)
    for version in (1, 0, 1):
        update(real, versions, f"v{version}", kv_max_age=1)
        until_made_by(generation, version)
    answer = ended(generation)
    meta = answer["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["v0", "v1", "v0", "v1"]
    returned = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    made_by = labels_of(spans)
    length = len(PROMPT)
    # the KV that each of the four versions read, by position
    begins = [length + span["start"] - 1 for span in spans]
    last = length + len(made_by) - 1
    read = [
        ["v0"] * last,
        ["v0"] * begins[1] + ["v1"] * (last - begins[1]),
        ["v0"] * last,
        ["v0"] * begins[3] + ["v1"] * (last - begins[3]),
    ]
    for span, kv in zip(spans, read, strict=True):
        begin, end = span["start"], span["end"]
        until_end = kv[: length + end - 1]
        expected = reference.logprobs(PROMPT, answer["output_ids"], made_by, until_end, begin)
        for index, value in enumerate(expected, begin):
            assert abs(returned[index] - value) < CLOSE, (index, spans)
        assert begin + len(expected) == end
    # the last two versions' KV is left
    assert labels_of(meta["kv_versions"]) == read[3]
