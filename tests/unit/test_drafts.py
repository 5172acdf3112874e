"""Embeddings shared with a draft belong to the target, whichever model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import json
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.client import digest_of_all, digests
from sglang_inflight.messages import DIRECT, AskedDigests, Selector
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.sources.batches import one_batch
from sglang_inflight.scheduler.update.update import Names, Update
from sglang_inflight.vocabulary.errors import Altered, Refused
from tests.support.rank import shadows_of
from tests.unit.fakes import uncounted

pytestmark = pytest.mark.usefixtures("either_way")

Weights = dict[str, torch.Tensor]
Piece = tuple[Selector, Weights]


class Model(nn.Module):
    def __init__(self, embeddings: nn.Parameter | None = None) -> None:
        super().__init__()
        self.embeddings = embeddings if embeddings is not None else weight(4)
        self.own = weight(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def weight(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size), requires_grad=False)


def weights_of(value: float) -> Weights:
    return {"embeddings": torch.full((4,), float(value)), "own": torch.full((3,), float(value))}


class Rank:
    """A rank with a target, and a draft with a checkpoint of its own."""

    def __init__(self, mode: StagingMode) -> None:
        self.target = Model()
        self.draft = Model(self.target.embeddings)
        models = [
            shadowed("target", self.target),
            shadowed("draft", self.draft),
        ]
        metrics = uncounted()
        groups: Any = None
        self._jobs = Jobs(
            models,
            shadows_of(models),
            groups,
            metrics,
            mode=mode,
            device=torch.device("cpu"),
            rate_limit=UNPACED,
            check_finite=True,
            layout={},
        )
        self.digest: str | None = None

    def update(
        self,
        *pieces: Piece,
        partial: bool,
        load_format: str | None = None,
        needs: Names | None = None,
        asked: AskedDigests | None = None,
    ) -> Update:
        """Make one update of ``pieces``, and return it."""
        call: Any = SimpleNamespace(
            update_id="u", partial=partial, may_be_empty=False, in_place=False, asks_digests=False
        )
        source: Any = SimpleNamespace(load_format=load_format)
        update = Update(call, base_version="", needs=needs)
        self._jobs.prepare(update, "all" if len(pieces) > 1 else pieces[0][0], after=None)
        for selector, weights in pieces:
            self._jobs.reader.read_once = lambda source, update, take: one_batch(  # type: ignore[method-assign]
                pair
                for pair in weights.items()  # noqa: B023
            )
            self._jobs.fill(update, source, selector, asked)
        self._jobs.seal(update, self.digest)
        assert update.sealed is not None
        update.sealed.swap.make()
        self.digest = update.sealed.digest
        return update

    @property
    def served(self) -> tuple[float, float, float]:
        """The shared embeddings, then each model's own weight."""
        found = self.target.embeddings, self.target.own, self.draft.own
        assert self.draft.embeddings is self.target.embeddings
        embeddings, own, drafts = ({float(x) for x in each} for each in found)
        return embeddings.pop(), own.pop(), drafts.pop()

    def read_digest(self) -> str | None:
        """Return the digest without a remembered one."""
        self.digest = None
        self.update(("target", {"own": self.target.own.clone()}), partial=True)
        return self.digest


def shadowed(role: str, model: nn.Module) -> ShadowedModel:
    runner: Any = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(
            model_path=role, revision=None, hf_config=None, hf_text_config=None
        ),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        weight_updater=SimpleNamespace(custom_weight_loaders={}),
    )
    return ShadowedModel(role, runner)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("load_format", [None, DIRECT])
@pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.OFF])
def test_draft_update_keeps_shared_embeddings(mode: StagingMode, load_format: str | None) -> None:
    rank = Rank(mode)
    rank.update(("draft", weights_of(7)), partial=False, load_format=load_format)
    assert rank.served == (1, 1, 7)


def test_digest_after_draft_update_matches_served_weights() -> None:
    rank = Rank(StagingMode.DEVICE)
    rank.update(("draft", weights_of(7)), partial=False)
    told = rank.digest
    assert rank.read_digest() == told


def test_update_of_both_takes_targets_embeddings() -> None:
    rank = Rank(StagingMode.DEVICE)
    rank.update(("target", weights_of(2)), ("draft", weights_of(7)), partial=False)
    assert rank.served == (2, 2, 7)
    rank.update(("draft", weights_of(8)), ("target", weights_of(3)), partial=False)
    assert rank.served == (3, 3, 8)
    told = rank.digest
    assert rank.read_digest() == told


def names_of(update: Update) -> Names:
    assert update.sealed is not None
    return update.sealed.names


def test_tensors_for_both_models_are_digested_once() -> None:
    """Equal tensors have one digest, whatever loads them."""
    rank = Rank(StagingMode.DEVICE)
    both = rank.update(("all", weights_of(2)), partial=True, asked=AskedDigests())
    assert rank.served == (2, 2, 2)
    assert both.received_digest == digest_of_all(digests(weights_of(2)).values())
    wrong = AskedDigests(expected=json.encode(digests(weights_of(2))))
    with pytest.raises(Altered, match="'embeddings', 'own' came with another digest"):
        rank.update(("all", weights_of(3)), partial=True, asked=wrong)
    assert rank.served == (2, 2, 2)


def test_target_update_changes_drafts_embeddings() -> None:
    rank = Rank(StagingMode.DEVICE)
    rank.update(("target", weights_of(2)), partial=False)
    assert rank.served == (2, 2, 1)


@pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
def test_needed_tensors_are_those_of_the_updates_models(mode: StagingMode) -> None:
    """A target's tensor does not stand in for a draft's of the same name."""
    rank = Rank(mode)
    target: Piece = ("target", weights_of(2))
    draft: Piece = ("draft", {"own": torch.full((3,), 7.0)})
    needs = names_of(rank.update(target, draft, partial=True, needs={}))
    assert needs == {"target": {"embeddings", "own"}, "draft": {"own"}}
    # one model alone needs its own tensors only
    alone = rank.update(draft, partial=True, needs=needs)
    assert names_of(alone) == {"draft": {"own"}}
    rank.update(target, partial=True, needs=needs)
    other: Piece = ("draft", {"embeddings": torch.full((4,), 7.0)})
    with pytest.raises(Refused, match=r"1 of the 1 tensors .* the draft model were not sent: own"):
        rank.update(target, other, partial=True, needs=needs)
    with pytest.raises(Refused, match="the target model were not sent: embeddings, own"):
        rank.update(other, other, partial=True, needs=needs)
