"""A rank of a server that is not there: its updates run on a model alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sglang_inflight.messages import Source, TensorSource, Voted
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind, record
from sglang_inflight.scheduler.update.changes.recording import Budget
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.reservation import Reservation
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.sources.batches import Weights, one_batch
from sglang_inflight.scheduler.update.sources.stretch import Stretch, Take
from sglang_inflight.scheduler.update.update import Update
from tests.support.pool import MASKING_LOADER
from tests.unit.fakes import uncounted

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
_UNLIMITED = Budget()


class Rank:
    """A rank that runs the jobs of real updates on this thread, without a server."""

    # whether tensors of the start's checkpoint go by a plan, recorded and not proven
    plans = False
    # most tensors of a stretch, 0 for tensors one by one
    stretches = 0

    def __init__(
        self,
        mode: StagingMode,
        model: nn.Module,
        *,
        checkpoint_shapes: Mapping[str, Sequence[int]],
        ties_head: bool = False,
        device: torch.device = CPU,
        budget: Budget = _UNLIMITED,
        load_format: str = "auto",
    ) -> None:
        """``checkpoint_shapes``: the shapes of the tensors in the start's checkpoint.

        ``device``: of the model's forwards.
        """
        self.model = model
        self.shadowed = ShadowedModel("target", runner_of(model, ties_head, load_format))
        self.shadowed.findings._checkpoint_shapes = {
            name: tuple(shape) for name, shape in checkpoint_shapes.items()
        }
        if self.plans and mode is not StagingMode.OFF and checkpoint_shapes:
            dtype = next(model.parameters()).dtype
            kinds = {n: Kind(tuple(shape), dtype) for n, shape in checkpoint_shapes.items()}
            self.shadowed.findings.plan = Plan.of(
                record(model, kinds), kinds, dict(weights_of(model))
            )
        self.writes = 0
        if mode is StagingMode.OFF:
            self.shadowed.on_write = self._count_write
        metrics = uncounted()
        groups: Any = None
        self._jobs = Jobs(
            [self.shadowed],
            shadows_of([self.shadowed], budget),
            groups,
            metrics,
            mode=mode,
            device=device,
            rate_limit=UNPACED,
            check_finite=True,
            layout={},
        )
        self._layouts: dict[str, Stretch] = {}
        self._previous: Any = None
        self._is_marked = False
        # digest of the live weights, None if unknown
        self.digest: str | None = None
        self.base_digest: str | None = None
        # the vote for the last update
        self.voted: Voted

    def finish_after_loading(self, pristine: nn.Module, recipe: Recipe) -> None:
        """Let updates finish the model as ``recipe`` says. ``pristine``: before any loading."""
        self.shadowed.findings.pristine, self.shadowed.findings.recipe = pristine, recipe
        if self.shadowed.findings.plan is not None:
            kinds, weights = self.shadowed.findings.plan.kinds, plannable(self.model, recipe)
            self.shadowed.findings.plan = plan = Plan.of(record(pristine, kinds), kinds, weights)
            leave_torn(plan, recipe, self.model, weights)

    @property
    def has_plan(self) -> bool:
        return self.shadowed.findings.plan is not None

    def fill_hollow(self, call: Tensors) -> int:
        """Make a partial update of hollow weights. Return the number of elements still missing."""
        opened: Any = SimpleNamespace(
            update_id="u", partial=True, may_be_empty=False, in_place=False, asks_digests=False
        )
        update = Update(opened, base_version="", fills_hollow=True, marks=not self._is_marked)
        self._is_marked = True
        self.send(update, [call])
        assert update.sealed is not None
        return update.sealed.missing

    def update(
        self, *calls: Tensors, partial: bool = False, load_format: str | None = None
    ) -> None:
        """Make one update of several calls, overwriting the sender's memory after each call."""
        update = self.begin(partial=partial)
        self.send(update, calls, load_format)
        self.commit(update)

    def update_sparse(self, parts: Tensors, whole: Tensors) -> None:
        """Send ``parts``, and what the rank takes only ``whole``, in one update."""
        update = self.begin(partial=True)
        self.prepare(update)
        self.fill(update, parts, "sparse")
        if unpatched := set[str]().union(*update.unpatched.values()):
            self.fill(update, {name: whole[name] for name in unpatched})
        self.seal(update)
        self.commit(update)

    def commit(self, update: Update) -> None:
        assert update.sealed is not None
        self.base_digest, self.digest = update.base_digest, update.sealed.digest
        self._previous = update.sealed.swap
        self._previous.make()
        self._jobs.note_commit(rolls_back=False)
        # the digest may have been made while other tensors came
        assert self.digest == self._jobs._read_through(update, set(), set())

    def begin(self, *, partial: bool = False) -> Update:
        opened: Any = SimpleNamespace(
            update_id="u", partial=partial, may_be_empty=False, in_place=False, asks_digests=False
        )
        return Update(opened, base_version="")

    def send(
        self,
        update: Update,
        calls: Sequence[Tensors],
        load_format: str | None = None,
        *,
        after: Any = None,
    ) -> None:
        """Stage and seal ``update``, without a commit. ``after``: see ``Jobs.prepare``."""
        self.prepare(update, after=after)
        for call in calls:
            self.fill(update, call, load_format)
        self.seal(update)

    def prepare(self, update: Update, *, after: Any = None) -> None:
        self._jobs.prepare(update, None, after=after)

    def fill(self, update: Update, call: Tensors, load_format: str | None = None) -> None:
        source: Any = tensor_source(load_format)
        sent = {name: tensor.clone() for name, tensor in call.items()}
        self._jobs.reader.read_once = lambda source, update, take: one_batch(  # type: ignore[method-assign]
            self._in_stretches(sent, take) if self.stretches else (pair for pair in sent.items())
        )
        self._jobs.fill(update, source, None)
        del self._jobs.reader.read_once
        for tensor in sent.values():
            tensor.fill_(-1)

    def _in_stretches(self, sent: Tensors, take: Take) -> Weights:
        """Yield what ``take`` leaves of ``sent``. Equal layouts are the same objects."""
        runs: list[list[tuple[str, torch.Tensor]]] = []
        for name, tensor in sent.items():
            start = sum(t.nbytes for _, t in runs[-1]) if runs else 0
            if not runs or len(runs[-1]) == self.stretches or start % tensor.itemsize:
                runs.append([])
            runs[-1].append((name, tensor))
        for run in runs:
            stretch = Stretch.begin()
            for name, tensor in run:
                stretch.add(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            layout = f"{stretch.names} {stretch.dtypes} {stretch.shapes}"
            row = torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in run])
            stretch = self._layouts.setdefault(layout, stretch)
            if left := take(stretch, row):
                yield from stretch.tensors(row, left)
            else:
                # nothing may keep it
                row.fill_(255)

    def fill_from(self, update: Update, source: Source, groups: Any = None) -> None:
        """Read ``source`` as a server does. ``groups``: those of the trainers that broadcast."""
        self._jobs.reader._groups = groups
        self._jobs.fill(update, source, None)

    def seal(self, update: Update) -> None:
        self.voted = self._jobs.seal(update, self.digest)

    def roll_back(self) -> None:
        self._previous.make()

    def _count_write(self) -> None:
        self.writes += 1


def shadows_of(models: Sequence[ShadowedModel], budget: Budget = _UNLIMITED) -> Shadows:
    """Return the shadows of ``models``, without reserved memory."""
    storage_for = Reservation(StagingMode.DEVICE).storage_for
    return Shadows(models, storage_for, UNPACED, budget, check_finite=True)


def tensor_source(load_format: str | None) -> Any:
    return TensorSource(serialized_named_tensors=[], load_format=load_format)


def runner_of(model: nn.Module, ties_head: bool, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(
            model_path="",
            revision=None,
            hf_config=SimpleNamespace(tie_word_embeddings=ties_head),
            hf_text_config=SimpleNamespace(tie_word_embeddings=ties_head),
        ),
        load_config=SimpleNamespace(download_dir=None, load_format=load_format),
        weight_updater=SimpleNamespace(custom_weight_loaders=[MASKING_LOADER]),
    )
