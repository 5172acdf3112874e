"""Recipes are kept between servers, and never taken for another model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sglang_inflight.scheduler.update.finished.places import Place
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.finished.remembered import name_recipe, recall, remember

RECIPE = Recipe(
    names={"a.weight": frozenset({"a.upper", "a.lower"})},
    kept=frozenset({"b.weight"}),
    tensors=frozenset({Place("a", "weight"), Place("a", "scales", 1)}),
    numbers=frozenset({Place("a", "factor")}),
    awaited=frozenset({"b"}),
)
RANK = ("target", "tp 0/1", "pp 0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_recipe_comes_back_whole() -> None:
    assert recall("name") is None
    remember("name", RECIPE)
    assert recall("name") == RECIPE


@pytest.mark.parametrize("content", [b"", b"{", b'{"names": {}}', b"[1, 2]"])
def test_broken_file_is_found_anew(cache: Path, content: bytes) -> None:
    remember("name", RECIPE)
    (cache / "recipes" / "name.json").write_bytes(content)
    assert recall("name") is None


def test_folder_that_cannot_be_written_costs_nothing_else(cache: Path) -> None:
    cache.write_text("a file")
    remember("name", RECIPE)
    assert recall("name") is None


def test_another_checkpoint_model_or_rank_has_another_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, live = nn.Linear(2, 2), nn.Linear(2, 2)
    name = name_recipe(checkpoint, raw, live, RANK)
    assert name == name_recipe(checkpoint, nn.Linear(2, 2), nn.Linear(2, 2), RANK)
    others = {
        name_recipe(checkpoint, raw, nn.Linear(2, 3), RANK),
        name_recipe(checkpoint, nn.Linear(2, 2, dtype=torch.bfloat16), live, RANK),
        name_recipe(checkpoint, raw, live, ("target", "tp 1/2", "pp 0")),
    }
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    others.add(name_recipe(checkpoint, raw, live, RANK))
    monkeypatch.setenv("SGLANG_OF_A_TEST", "1")
    others.add(name_recipe(checkpoint, raw, live, RANK))
    assert len(others) == 5
    assert name not in others
