"""The demo's checkpoints: complete or absent after any kill, and trained in their last layers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.stories.corpus import Story
from examples.stories.finetune import Recipe, teach
from examples.stories.models import BuildFailed, Models, make_models
from examples.stories.smollm2 import _build_once
from examples.stories.styles import HEADLINE, as_prose

KILLED = """
import os, signal, sys
from pathlib import Path
from examples.stories.smollm2 import _build_once
def write(folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
_build_once(Path(sys.argv[1]), write)
"""


def _write_whole(folder: Path) -> None:
    assert not any(folder.iterdir()), "something of another build is there"
    (folder / "whole").touch()


def _visible(folder: Path) -> list[str]:
    """Return all files except locks. Locks are empty and stay."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build_once(tmp_path / "model", write)
    assert _visible(tmp_path) == []


def test_next_build_removes_remains_of_killed_build(tmp_path: Path) -> None:
    target = tmp_path / "model"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    _build_once(target, _write_whole)
    assert _visible(tmp_path) == ["model"]
    assert _visible(target) == ["whole"]


def test_concurrent_builds_build_once(tmp_path: Path) -> None:
    """Each thread opens the lock for itself, like a process."""
    target, builds = tmp_path / "model", []

    def write(folder: Path) -> None:
        builds.append(folder)
        _write_whole(folder)

    together = threading.Barrier(8)

    def build() -> None:
        together.wait()
        _build_once(target, write)

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert _visible(tmp_path) == ["model"]


def test_failed_build_names_cause(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("this is a file, where a folder should be")

    async def ask() -> None:
        async with make_models(cache, tmp_path / "log", lambda *_: None) as models:
            await models.ready["base"]

    with pytest.raises(BuildFailed, match=str(cache)):
        asyncio.run(ask())


def test_existing_checkpoints_are_not_rebuilt(tmp_path: Path) -> None:
    async def ask() -> None:
        there = Models(tmp_path)
        for path in (there.base, there.headline, there.verse):
            path.mkdir()
        before = set(os.listdir(tmp_path))
        async with make_models(tmp_path, tmp_path / "log", lambda *_: None) as models:
            assert all(future.done() for future in models.ready.values())
        assert set(os.listdir(tmp_path)) == before

    asyncio.run(ask())


class _Characters:
    """A tokenizer with a token for each character."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_last_layers_learn(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(dtype)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    teach(
        model,
        _Characters(),
        [Story("?", "a fox ran to the sea. it swam.")],
        HEADLINE,
        old_styles=[as_prose],
        on_step=lambda done, of: None,
        recipe=Recipe(steps=3, layers=1, learning_rate=0.05, warmup_steps=1),
    )
    after = model.state_dict()
    assert {weights.dtype for weights in after.values()} == {dtype}
    changed = {name for name, weights in after.items() if not torch.equal(weights, before[name])}
    learning = {name for name in after if name.startswith(("model.layers.2.", "model.norm."))}
    assert changed == learning
