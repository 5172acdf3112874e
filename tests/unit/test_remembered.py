"""Recipes are kept between servers, and never taken for another model's."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from torch import nn

from sglang_inflight.scheduler.update.finished import remembered
from sglang_inflight.scheduler.update.finished.places import Place
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.finished.remembered import name_recipe, recall, remember

RECIPE = Recipe(
    names={"a.weight": frozenset({"a.upper", "a.lower"})},
    untouched=frozenset({"b.weight"}),
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


LAYOUT = {"device": "cuda 9.0", "moe_runner_backend": "auto"}
# resolution needs a model's folder, and a name needs the values alone
ARGS = SimpleNamespace(
    __struct_fields__=("fp8_gemm_runner_backend", "port"), fp8_gemm_runner_backend="auto", port=1
)


@pytest.fixture
def served(checkpoint: Path) -> dict[str, Any]:
    """The arguments of a recipe's name."""
    return {
        "checkpoint": checkpoint,
        "pristine": nn.Linear(2, 2),
        "live": nn.Linear(2, 2),
        "place": RANK,
        "layout": LAYOUT,
        "server_args": ARGS,
    }


def test_another_checkpoint_model_or_rank_has_another_name(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_recipe(**served)
    alike = {"pristine": nn.Linear(2, 2), "live": nn.Linear(2, 2), "layout": dict(LAYOUT)}
    assert name == name_recipe(**served | alike)
    others = {
        name_recipe(**served | {"live": nn.Linear(2, 3)}),
        name_recipe(**served | {"pristine": nn.Linear(2, 2, dtype=torch.bfloat16)}),
        name_recipe(**served | {"place": ("target", "tp 1/2", "pp 0")}),
    }
    (served["checkpoint"] / "model.safetensors").write_bytes(b"other weights")
    others.add(name_recipe(**served))
    monkeypatch.setenv("SGLANG_OF_A_TEST", "1")
    others.add(name_recipe(**served))
    assert len(others) == 5
    assert name not in others


@pytest.mark.parametrize(
    "other",
    [
        {"layout": {**LAYOUT, "moe_runner_backend": "triton"}},
        {"layout": {**LAYOUT, "device": "cuda 10.0"}},
        {"server_args": SimpleNamespace(**vars(ARGS) | {"fp8_gemm_runner_backend": "triton"})},
    ],
    ids=["method", "card", "argument"],
)
def test_recipe_of_other_kernels_is_not_recalled(
    served: dict[str, Any], other: dict[str, Any]
) -> None:
    """Kernels decide which weights finishing leaves alone, and shapes and dtypes stay equal."""
    assert name_recipe(**served) != name_recipe(**served | other)


def test_recipe_of_other_experts_on_this_rank_is_not_recalled(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file behind ``--init-expert-location`` may have changed, and no shape shows it."""
    names = [name_recipe(**served)]
    for order in ([0, 1, 2], [2, 1, 0]):
        placement = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([order]))
        monkeypatch.setattr(
            remembered, "get_global_expert_location_metadata", lambda placed=placement: placed
        )
        names.append(name_recipe(**served))
    assert len(set(names)) == 3


@pytest.mark.parametrize("library", ["flashinfer-python", "sglang-kernel", "sgl-deep-gemm"])
def test_recipe_of_another_kernel_library_is_not_recalled(
    served: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_recipe(**served)
    monkeypatch.setattr(
        remembered, "version", lambda package: "9" if package == library else version(package)
    )
    assert name_recipe(**served) != name


def test_recipe_of_another_port_is_recalled(served: dict[str, Any]) -> None:
    args = SimpleNamespace(**vars(ARGS) | {"port": 2})
    assert name_recipe(**served) == name_recipe(**served | {"server_args": args})


def test_arguments_of_finishing_are_among_sglangs() -> None:
    """A word that is in no argument's name guards nothing any more."""
    args: Any = ServerArgs
    names: tuple[str, ...] = args.__struct_fields__
    for word in remembered._OF_FINISHING:
        assert any(word in name for name in names), word
