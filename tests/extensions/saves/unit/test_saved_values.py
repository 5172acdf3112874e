"""Weights that another server has saved are checked as a trainer's are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.extensions.saves import loading
from sglang_inflight.messages import SavedFolderSource
from sglang_inflight.scheduler.update.jobs import WHOLE_LOADERS
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.errors import Refused
from tests.extensions.saves.saved_folder import write_saved
from tests.support.rank import Rank

EVERY_MODE = pytest.mark.parametrize(
    "mode", [StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF]
)


class Model(nn.Module):
    """It serves infinity by itself, in a mask that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    WHOLE_LOADERS.compose([loading.__name__])
    monkeypatch.setattr(loading, "get_parallel", lambda: SimpleNamespace(pp_rank=0, tp_rank=0))
    with torch.no_grad():
        yield
    WHOLE_LOADERS.compose([])


def load(rank: Rank, folder: Path) -> str:
    """Load what another server serves, and return the name that it says."""
    opened: Any = SimpleNamespace(
        update_id="u", partial=False, may_be_empty=False, in_place=False, asks_digests=False
    )
    update = Update(opened, base_version="")
    rank._jobs.prepare(update, "all", after=None)
    staged = rank._jobs.fill(update, SavedFolderSource(model_path=str(folder)), None)
    rank._jobs.seal(update, None)
    assert update.sealed is not None
    update.sealed.swap.make()
    assert staged.saved is not None
    return staged.saved.weight_version


@EVERY_MODE
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_of_another_server_is_refused(tmp_path: Path, mode: StagingMode, value: float) -> None:
    model = Model()
    rank = Rank(mode, model, checkpoint_shapes={})
    weight = torch.tensor([1.0, value, 1.0, 1.0])
    write_saved(tmp_path, {"target.weight": weight, "target.mask": model.mask})
    with pytest.raises(Refused, match=r"'target\.weight' holds NaN or infinity"):
        load(rank, tmp_path)
    assert model.weight.tolist() == [0.0] * 4


@EVERY_MODE
def test_infinity_that_the_model_serves_itself_is_taken(tmp_path: Path, mode: StagingMode) -> None:
    model = Model()
    rank = Rank(mode, model, checkpoint_shapes={})
    write_saved(tmp_path, {"target.weight": torch.ones(4), "target.mask": model.mask})
    assert load(rank, tmp_path) == "v1"
    assert model.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["a\nb", "a\u202eb", "a\0b", ""])
def test_unprintable_name_of_another_server_is_refused(tmp_path: Path, name: str) -> None:
    model = Model()
    rank = Rank(StagingMode.CHANGES, model, checkpoint_shapes={})
    tensors = {"target.weight": torch.ones(4), "target.mask": model.mask}
    write_saved(tmp_path, tensors, weight_version=name)
    with pytest.raises(Refused, match=r"weight_version|weight version"):
        load(rank, tmp_path)


def test_served_weights_are_refused_without_their_extension(tmp_path: Path) -> None:
    WHOLE_LOADERS.compose([])
    rank = Rank(StagingMode.DEVICE, Model(), checkpoint_shapes={"weight": (4,)})
    with pytest.raises(Refused, match="the extension that reads them is off"):
        load(rank, tmp_path)
