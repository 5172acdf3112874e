"""Behind a fence, no request uses an image embedding by older weights.

Updates here change the vision tower alone, so only a newly encoded image changes the answer.
Prompts without a shared prefix differ in their first word.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.server import Server, serve
from tests.support import vision
from tests.support.load import ask
from tests.support.pool import ServerPool
from tests.support.updates import tensor_body

RED, BLUE = vision.picture("red"), vision.picture("blue")

_serial = itertools.count(200)


class Tower:
    """The vision tower's weights. Each update moves them further from the first."""

    def __init__(self, server: Server, checkpoint: Path) -> None:
        self._server = server
        weights = load_file(checkpoint / "model.safetensors")
        self._first = {n: t for n, t in weights.items() if "visual." in n}
        self._scale = 1.0

    def change(self, kv_cache: str) -> None:
        self._scale += 0.5
        self.send(kv_cache)

    def send(self, kv_cache: str) -> None:
        """Send the weights unchanged, so that ``recompute`` only clears caches."""
        scaled = {name: self._scale_up(tensor) for name, tensor in self._first.items()}
        body = tensor_body(scaled, non_blocking=True, kv_cache=kv_cache)
        ask(self._server, "POST", "/update_weights_from_tensor", body)

    def _scale_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self._scale if tensor.dim() > 1 else tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.build(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, pool: ServerPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pool.discard()  # one server at a time
    flags = ("--enable-multimodal", "--mm-attention-backend", "sdpa", "--weight-version", "v0")
    log = tmp_path_factory.mktemp("logs") / "vision.log"
    env = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}
    with serve(checkpoint, *flags, log=log, env=env) as server:
        yield server


@pytest.fixture
def tower(server: Server, checkpoint: Path) -> Iterator[Tower]:
    yield (tower := Tower(server, checkpoint))
    tower.change("recompute")


def fresh_word() -> str:
    return f"t{next(_serial)}"


def describe(server: Server, image: str, word: str) -> tuple[list[float], Any]:
    """Return the answer's log-probabilities for an image, and its ``meta_info``."""
    body = {
        "text": f"{word} {vision.IMAGE} t30 t31",
        "image_data": image,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = ask(server, "POST", "/generate", body)["meta_info"]
    return [logprob for logprob, *_ in meta["output_token_logprobs"]], meta


def said(server: Server, image: str, word: str) -> list[float]:
    return describe(server, image, word)[0]


def test_answers_depend_on_the_image_and_on_the_tower(server: Server, tower: Tower) -> None:
    """Otherwise the other tests would prove nothing."""
    word = fresh_word()
    red = said(server, RED, word)
    assert said(server, BLUE, word) != red
    tower.change("recompute")
    assert said(server, RED, word) != red


def test_fence_stops_reuse_of_old_image_embeddings(server: Server, tower: Tower) -> None:
    word = fresh_word()
    before = said(server, RED, word)
    tower.change("fence")
    after, meta = describe(server, RED, word)
    assert meta["cached_tokens"] == 0
    tower.send("recompute")
    assert after == said(server, RED, word) != before


def test_keep_reuses_old_image_embeddings(server: Server, tower: Tower) -> None:
    """A new prompt then mixes versions, as ``keep`` permits."""
    said(server, RED, fresh_word())
    tower.change("keep")
    word = fresh_word()
    mixed, meta = describe(server, RED, word)
    assert meta["cached_tokens"] == 0
    tower.send("recompute")
    assert said(server, RED, word) != mixed


def test_reset_encoder_cache_clears_old_image_embeddings(server: Server, tower: Tower) -> None:
    said(server, RED, fresh_word())
    tower.change("keep")
    assert server.post("/reset_encoder_cache")["status_code"] == 200
    word = fresh_word()
    after = said(server, RED, word)
    tower.send("recompute")
    assert said(server, RED, word) == after
