"""Random updates beside forwards: each forward computes with exactly one version.

``GLASS_WALKS=10000`` makes so many walks of each form. A failed one is made again by its seed.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_inflight.scheduler.update.live_machine import Open
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.glass.card import in_child
from tests.glass.card_rank import (
    COLUMNS,
    ON_HOST,
    ROWS,
    UNLIMITED,
    CardRank,
    Model,
    glass,
    on_device,
)

WALKS = int(os.environ.get("GLASS_WALKS", "4"))
A_PROCESS = 25
# no thread and no pause: every wait does work in an order by the seed; GLASS_WALKS_LATE=0 has both
ORDER = {"late": 1} if os.environ.get("GLASS_WALKS_LATE", "1") == "1" else {"delay_us": 500}
STEPS = 12
FORMS = {
    "changes": (StagingMode.CHANGES, UNLIMITED),
    "changes on host": (StagingMode.CHANGES, ON_HOST),
    "device": (StagingMode.DEVICE, UNLIMITED),
    "host": (StagingMode.HOST, UNLIMITED),
}
Weights = Mapping[str, torch.Tensor]


class Walk:
    """The scheduler's side of a walk. A thread stages beside it."""

    def __init__(self, form: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._draw = random.Random(seed)
        mode, budget = FORMS[form]
        model = on_device(Model())
        self._rank = CardRank(model, mode, budget, overlaps=self._draw.random() < 0.7)
        self._live = self._rank.live
        self._now: Weights = {name: weight.cpu() for name, weight in model.named_parameters()}
        self._previous: Weights = self._now
        # each forward's result, and the right one
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps: list[str] = []

    def walk(self) -> None:
        steps = {
            "update": self._update,
            "dropped update": lambda: self._update(commits=False),
            "turn": self._take_a_turn,
            "rollback": self._roll_back,
            "forward": lambda: self._run(self._now),
            "boundary": self._live.free_given_up,
        }
        for step in self._draw.choices(list(steps), weights=[2, 1, 3, 1, 2, 1], k=STEPS):
            self._steps.append(step)
            steps[step]()
        glass.synchronize()
        for result, expected in self._results:
            assert torch.equal(result.cpu(), expected), self._steps
        for name, weight in self._now.items():
            assert torch.equal(self._rank.model.get_parameter(name).cpu(), weight), self._steps
        assert glass.races() == []

    def _run(self, version: Weights) -> None:
        self._results.append((self._rank.run(), version["weight"] + version["other"]))

    def _take_a_turn(self) -> None:
        if (previous := self._live.reachable) is not None:
            with self._live.previous_in_place(previous):
                self._run(self._previous)

    def _roll_back(self) -> None:
        if self._live.reachable is not None:
            self._live.swap_back(base=VersionLabel(0, "v0"))
            self._now, self._previous = self._previous, self._now

    def _update(self, *, commits: bool = True) -> None:
        new, calls, is_partial = self._draw_update()
        self._live.move(Open(is_partial))
        sealed: list[Any] = []
        failed: list[BaseException] = []

        def stage() -> None:
            try:
                sealed.append(self._rank.stage(*calls, partial=is_partial))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=stage)
        thread.start()
        while thread.is_alive():
            self._run(self._now)
            thread.join(0.002)
        if failed:
            raise failed[0]
        if commits:
            self._rank.commit(sealed[0])
            self._now, self._previous = new, self._now

    def _draw_update(self) -> tuple[Weights, Sequence[Weights], bool]:
        """Return the new weights, what is sent of them in each call, and whether it is partial."""
        old, (name, *_) = self._now, self._draw.sample(list(self._now), k=1)
        whole = torch.randn(ROWS, COLUMNS)
        kind = self._draw.choice(["whole", "some elements", "one weight", "a weight and its half"])
        if kind == "whole":
            new = {name: torch.randn(ROWS, COLUMNS) for name in old}
            return new, [new], False
        if kind == "some elements":
            changed = {name: weight.clone() for name, weight in old.items()}
            for weight in changed.values():
                count = self._draw.randrange(40)
                weight.view(-1)[torch.randperm(weight.numel())[:count]] = torch.randn(count)
            return changed, [changed], False
        if kind == "one weight":
            return {**old, name: whole}, [{name: whole}], True
        upper = torch.randn(ROWS // 2, COLUMNS)
        both = torch.cat([upper, whole[ROWS // 2 :]])
        return {**old, "weight": both}, [{"weight": whole}, {"upper": upper}], True


def batches() -> Iterator[tuple[str, range]]:
    for first in range(0, WALKS, A_PROCESS):
        for form in FORMS:
            yield form, range(first, min(WALKS, first + A_PROCESS))


def walk_all(form: str, seeds: range) -> None:
    for seed in seeds:
        glass.reseed(seed)
        try:
            Walk(form, seed).walk()
        except BaseException as error:
            error.add_note(f"the walk of {form!r} with the seed {seed}")
            raise


@pytest.mark.parametrize(("form", "seeds"), batches())
def test_forwards_compute_with_one_version(form: str, seeds: range, tmp_path: Path) -> None:
    walks = in_child(lambda: walk_all(form, seeds), tmp_path, **ORDER)
    assert (walks.error, walks.signal) == ("", 0), walks.stderr
