"""Location of a checkpoint, by its path or by its name on the Hub."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_inflight.scheduler.update.sources.checkpoint_files import (
    Shapes,
    find_checkpoint,
    read_stored,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, shape in SHAPES.items():
        save_file({name: torch.zeros(shape)}, folder / f"{name}.safetensors")
    return folder


def read_shapes(path: str, *, revision: str | None = None, cache: str | None = None) -> Shapes:
    stored = read_stored(find_checkpoint(path, revision, cache))
    return {name: tensor.shape for name, tensor in stored.items()}


def test_shapes_are_read_from_a_directory(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    assert read_shapes(str(folder), revision=None, cache=None) == SHAPES


def test_shapes_are_read_from_the_hub_cache(tmp_path: Path) -> None:
    """Lay out a cache like the Hub's client."""
    repository = tmp_path / "models--some--model"
    write(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    cache = str(tmp_path)
    assert read_shapes("some/model", revision=None, cache=cache) == SHAPES
    assert read_shapes("some/model", revision=COMMIT, cache=cache) == SHAPES
    assert read_shapes("some/model", revision="other", cache=cache) == {}


def test_missing_checkpoint_has_no_shapes(tmp_path: Path) -> None:
    assert read_shapes("some/model", revision=None, cache=str(tmp_path)) == {}
    assert read_shapes(str(tmp_path / "none"), revision=None, cache=str(tmp_path)) == {}
