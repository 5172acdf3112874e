"""Findings: how a model's tensors come into its served weights, found out once.

    recipe    how SGLang's finishing makes the served tensors, for a model that is finished
    plan      where each tensor's elements go

Both are searched for beside the server's work, and remembered.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from torch import nn

from sglang_inflight.host_memory import available_to_this_rank
from sglang_inflight.messages import (
    DiskSource,
)
from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.plans.finding import find_plan
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind as PlanKind
from sglang_inflight.scheduler.plans.record import kinds_of
from sglang_inflight.scheduler.update.checks.configuration import StartConfiguration
from sglang_inflight.scheduler.update.checks.stageable import (
    why_not_shadowed,
    why_stale,
)
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.finished.pristine import construct
from sglang_inflight.scheduler.update.finished.proof import NotNow, find_recipe
from sglang_inflight.scheduler.update.finished.proving import Proving
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.finished.remembered import name_recipe, recall, remember
from sglang_inflight.scheduler.update.rate import UNPACED, RateLimit, use_one_core
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import (
    Shapes,
    Stored,
    find_checkpoint,
    read_quantization_config,
    read_stored,
)
from sglang_inflight.scheduler.update.sources.disk import Folder, check_configuration, read_disk
from sglang_inflight.scheduler.update.sources.quantizing import Quantized, find_quantized
from sglang_inflight.scheduler.update.sources.safetensors_file import EVERYTHING, Wanted
from sglang_inflight.scheduler.update.sources.safetensors_file import Place as StoredPlace
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.answers import Proof, Ways
from sglang_inflight.vocabulary.errors import (
    Dropped,
    Refused,
    Unproven,
    describe,
)
from sglang_inflight.vocabulary.regions import Region

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Weights = Iterator[tuple[str, torch.Tensor]]


class Findings:
    """The findings of one model. The staging thread owns them, but for ``note_commit``."""

    def __init__(self, role: str, runner: ModelRunner, forward_caches: ForwardCaches) -> None:
        self._role = role
        self._runner = runner
        self._forward_caches = forward_caches
        # the checkpoint at the server's start
        self.checkpoint = runner.model_config.model_path
        self.configuration = StartConfiguration.of(runner)
        # the model before loading, if SGLang finishes it after loading; None if it does not
        self.pristine: nn.Module | None = None
        self.recipe: Recipe | None = None
        # why the model's finishing cannot be repeated beside it, once that is known
        self.unproven: str | None = None
        self._proving: Proving[Recipe] | None = None
        self._may_be_proven_later = False
        self.plan: Plan | None = None
        # None before the first search for a plan
        self.ways: Ways | None = None
        self._is_unplannable = False
        self._finding: Proving[Plan] | None = None
        # whether something else is served than the start's or a commit's checkpoint
        self.is_written_otherwise = runner.load_config.load_format == LoadFormat.DUMMY
        self._checkpoint_shapes: Shapes | None = None
        self._kinds: dict[str, PlanKind] = {}

    def prepare_to_finish(self) -> None:
        """Construct the model a second time if SGLang finishes it after loading.

        Call on the scheduler's thread, before the first step.
        """
        model = self._runner.model
        if why_not_shadowed(model) is None or why_stale(model) is not None:
            return
        try:
            self.pristine = construct(self._runner)
        except Exception as error:
            logger.warning(
                "The %s model is updated in place: its class cannot be constructed again: %s",
                self._role,
                describe(error),
            )

    @property
    def finishes(self) -> bool:
        """Whether SGLang finishes the model after loading, and updates repeat that beside it."""
        return self.pristine is not None

    def prove(
        self,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
        *,
        again: bool = False,
    ) -> None:
        """Find out once how finishing makes the served model. Raise ``Unproven`` if it does not.

        ``check`` raises to give up waiting: the search goes on, and the next call waits for the
        same one. ``again``: search anew if the last search failed for a reason that may pass. Ranks
        get the same ``again``, so none of them searches while another refuses. ``layout`` is this
        rank's, see ``layout.py``.
        """
        if self.pristine is None or self.recipe is not None:
            return
        if self.unproven is None or (again and self._may_be_proven_later):
            self.unproven = None
            self._prove(self.pristine, device, check, rate_limit, layout)
        if self.unproven is not None:
            raise Unproven(f"weights of the {self._role} model cannot be staged: {self.unproven}")

    def _prove(
        self,
        pristine: nn.Module,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
    ) -> None:
        def find(require_wanted: Callable[[], None]) -> Recipe:
            if rate_limit is not UNPACED and device.type == "cpu":
                use_one_core()
            paced = rate_limit.for_another_thread()
            return self._find_recipe(pristine, device, require_wanted, paced, layout)

        try:
            if self.is_written_otherwise:
                raise NotNow(_WRITTEN_OTHERWISE)
            self._proving = self._proving or Proving(find, device)
            self.recipe = self._proving.result(check)
        except Dropped as dropped:
            raise Dropped(
                f"{dropped}. SGLang finishes the {self._role} model after loading, and the search "
                "for how goes on: send the update again"
            ) from dropped
        except Unproven as error:
            self.unproven, self._may_be_proven_later = str(error), isinstance(error, NotNow)
            logger.warning("The %s model is updated in place: %s", self._role, error)
        self._proving = None

    @property
    def may_be_proven_later(self) -> bool:
        """Whether the proof failed for a reason that may pass."""
        return self.unproven is not None and self._may_be_proven_later

    @property
    def kinds(self) -> Mapping[str, PlanKind]:
        """Shapes and dtypes of the tensors in the start's checkpoint, once it was read."""
        return self._kinds

    @functools.cached_property
    def whole(self) -> Mapping[str, Region]:
        """All of each tensor in the start's checkpoint, once it was read."""
        return {name: Region.whole(kind.shape) for name, kind in self._kinds.items()}

    def find_plan(
        self,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
    ) -> None:
        """Find the model's plan once. Without one all tensors go by the model's loader.

        ``check`` and ``layout``: as for ``prove``.
        """
        if self.plan is not None or self._is_unplannable or not self._kinds:
            return
        pristine, recipe = self.pristine, self.recipe

        def find(require_wanted: Callable[[], None]) -> Plan:
            pace = rate_limit.for_another_thread()
            pace.limit_this_thread()
            if rate_limit is not UNPACED and device.type == "cpu":
                use_one_core()
            model = self._runner.model
            name = self._name_recipe(pristine or model, layout)

            def read_served(needed: Container[str]) -> Weights:
                return self._read_start_checkpoint(
                    require_wanted, pace, lambda place: place.name in needed
                )

            if pristine is None:
                weights, restrict = dict(weights_of(model)), _do_nothing_with
            else:
                assert recipe is not None
                weights = plannable(model, recipe)
                restrict = functools.partial(leave_torn, recipe=recipe, live=model, weights=weights)
            return find_plan(
                pristine or model,
                weights,
                self._kinds,
                name,
                lambda: not self.is_written_otherwise,
                read_served,
                require_wanted,
                pace,
                restrict=restrict,
            )

        self._finding = self._finding or Proving(find, device)
        try:
            self.plan = self._finding.result(check)
            self.ways = self.plan.ways(finishes=self.finishes)
        except Dropped as dropped:
            raise Dropped(
                f"{dropped}. The search for where the {self._role} model's tensors go goes on: "
                "send the update again"
            ) from dropped
        except Exception as error:
            self._is_unplannable = True
            # one reason for all
            why = str(error) if isinstance(error, Refused) else describe(error)
            self.ways = Plan(self._kinds, {}, dict.fromkeys(self._kinds, why), {}).ways(
                finishes=self.finishes
            )
            logger.warning(
                "All tensors of the %s model go by its loader: %s",
                self._role,
                why,
                exc_info=not isinstance(error, Refused),
            )
        self._finding = None

    def stop(self) -> None:
        """End the searches that go on, before the served weights are written or released."""
        for search in (self._proving, self._finding):
            if search is not None:
                search.stop()
        self._proving = self._finding = None

    def note_commit(self, writes_checkpoint: bool | None) -> None:
        """Note that other weights are served, of a checkpoint or not; None if none was written.

        The scheduler's thread calls it, while no job runs. A search may outlive its update, and
        must not compare a checkpoint with what is served from now on.
        """
        if self._finding is not None:
            self._finding.give_up()
            self._finding = None
        if writes_checkpoint is not None:
            self.is_written_otherwise = not writes_checkpoint

    def _find_recipe(
        self,
        pristine: nn.Module,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
    ) -> Recipe:
        model = self._runner.model
        with AbandonableThread(check) as thread:
            name = thread.do(lambda: self._name_recipe(pristine, layout))
            found = thread.do(lambda: recall(name)) if name is not None else None
        if found is not None:
            return found
        with closing(self._read_start_checkpoint(check, rate_limit)) as weights:
            found = find_recipe(
                pristine,
                model,
                device,
                weights,
                rate_limit,
                available_to_this_rank(),
                self._forward_caches.memory_after_loading(),
                check,
            )
        if name is not None:
            remember(name, found)
        return found

    def _name_recipe(self, pristine: nn.Module, layout: Mapping[str, str]) -> str | None:
        config = self._runner.model_config
        cache = self._runner.load_config.download_dir
        try:
            folder = find_checkpoint(config.model_path, config.revision, cache)
            ranks = get_parallel()
            place = self._role, f"tp {ranks.tp_rank}/{ranks.tp_size}", f"pp {ranks.pp_rank}"
            args = self._runner.server_args
            return name_recipe(folder, pristine, self._runner.model, place, layout, args)
        except OSError as error:
            logger.warning("The recipe of the %s model is not remembered: %s", self._role, error)
            return None

    @property
    def proof(self) -> Proof | None:
        """Whether finishing was repeated beside the served model; None if there is no need."""
        if self.pristine is None:
            return None
        if self.unproven is not None:
            return Proof(state="failed", why=self.unproven)
        return Proof(state="due" if self.recipe is None else "done")

    def _read_start_checkpoint(
        self,
        check: Callable[[], None],
        rate_limit: RateLimit,
        wants: Callable[[StoredPlace], bool] | None = None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from read_disk(
            DiskSource(model_path=self._runner.model_config.model_path),
            self._runner,
            refuse_another=functools.partial(self.refuse_another, warn=logger.warning),
            check=check,
            rate_limit=rate_limit,
            wants=EVERYTHING if wants is None else Wanted(wants),
        )

    def refuse_another(self, folder: Folder, warn: Callable[[str], None]) -> None:
        """Raise ``Refused`` if ``folder`` is another model's checkpoint (``check_configuration``).

        A draft loads its part of its target's checkpoint.
        """
        if self._role == "target":
            check_configuration(folder, self._runner, self.configuration, warn)

    def read_checkpoint(self, check: Callable[[], None]) -> dict[str, Quantized | None] | None:
        """Read once what the start's checkpoint has. ``check`` raises when it is time to give up.

        Return the forms of its quantized tensors by their names; None if it was read before.
        """
        if self._checkpoint_shapes is not None:
            return None
        with AbandonableThread(check) as thread:
            stored, config = thread.do(self._read_stored)
        self._checkpoint_shapes = {name: tensor.shape for name, tensor in stored.items()}
        self._kinds = kinds_of(stored)
        return find_quantized(stored, config)

    def shapes_now(self, check: Callable[[], None]) -> Shapes:
        """Read the shapes in the start's checkpoint anew. ``check``: as for ``read_checkpoint``."""
        with AbandonableThread(check) as thread:
            stored, _ = thread.do(self._read_stored)
        return {name: tensor.shape for name, tensor in stored.items()}

    @property
    def checkpoint_shapes(self) -> Shapes:
        """Shapes of the tensors in the start's checkpoint; empty if it is not on this machine."""
        assert self._checkpoint_shapes is not None
        return self._checkpoint_shapes

    def _read_stored(self) -> tuple[dict[str, Stored], dict[str, Any]]:
        folder = find_checkpoint(
            self.checkpoint,
            revision=self._runner.model_config.revision,
            cache=self._runner.load_config.download_dir,
        )
        return read_stored(folder), read_quantization_config(folder)


_WRITTEN_OTHERWISE = (
    "its weights are not those of a checkpoint on disk: updates have written them, or SGLang has "
    "started with random ones (--load-format dummy). A whole update from disk brings some to "
    "compare with"
)


def _do_nothing_with(plan: Plan) -> None:
    pass
