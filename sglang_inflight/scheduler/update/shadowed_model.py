"""One model of a rank, the target or a draft, with its shadow."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.utils import dynamic_import
from torch import nn

from sglang_inflight.host_memory import available_to_this_rank
from sglang_inflight.messages import (
    DIRECT,
    OF_CHECKPOINT,
    DiskSource,
    DistributedSource,
    LoadedSource,
    TensorSource,
    is_sparse,
)
from sglang_inflight.scheduler.update.checks.configuration import StartConfiguration
from sglang_inflight.scheduler.update.checks.dataflow import (
    Dataflow,
    Kind,
    Recorder,
    Write,
    without_threads,
)
from sglang_inflight.scheduler.update.checks.loader_reads import (
    LoaderReads,
    find_loader_reads,
    find_refreshed,
)
from sglang_inflight.scheduler.update.checks.stageable import (
    device_of,
    why_laid_out_anew,
    why_not_loaded,
    why_not_shadowed,
    why_stale,
)
from sglang_inflight.scheduler.update.checks.tensors import TensorChecks, TiedHead
from sglang_inflight.scheduler.update.finished.finished_model import (
    FinishedModel,
    live_numbers,
    live_tensors_of,
    memory_of,
)
from sglang_inflight.scheduler.update.finished.places import Number, Place, without_views
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.finished.pristine import construct
from sglang_inflight.scheduler.update.finished.proof import NotNow, find_recipe
from sglang_inflight.scheduler.update.finished.proving import Proving
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.finished.remembered import name_recipe, recall, remember
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.forward_caches import ForwardCaches
from sglang_inflight.scheduler.update.in_place import InPlaceModel
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.plans.audit import Audit, Differs
from sglang_inflight.scheduler.update.plans.finding import find_plan
from sglang_inflight.scheduler.update.plans.plan import Plan
from sglang_inflight.scheduler.update.plans.record import Kind as PlanKind
from sglang_inflight.scheduler.update.plans.replay import Replay
from sglang_inflight.scheduler.update.rate import UNPACED, RateLimit, paced, use_one_core
from sglang_inflight.scheduler.update.shadow import (
    Shadow,
    ShadowParameters,
    refresh_derived,
    refuse_shared_memory,
    weights_of,
)
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import (
    Shapes,
    Stored,
    find_checkpoint,
    read_quantization_config,
    read_stored,
)
from sglang_inflight.scheduler.update.sources.disk import Folder, check_configuration, read_disk
from sglang_inflight.scheduler.update.sources.quantizing import Quantizer, find_quantized
from sglang_inflight.scheduler.update.sources.sparse import Sparse, pair_up
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.answers import Proof, Ways
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Dropped,
    Refused,
    Unproven,
    describe,
    list_names,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Weights = Iterator[tuple[str, torch.Tensor]]


class ShadowedModel:
    """Loads tensors into the shadow of one model, or in place. Used on the staging thread."""

    def __init__(
        self,
        role: str,
        runner: ModelRunner,
        parameters: ShadowParameters,
        *,
        experts_move: bool = False,
        forward_caches: ForwardCaches | None = None,
    ) -> None:
        """``experts_move``: SGLang moves experts between ranks while it serves.

        ``forward_caches`` has noted the model before its first forward.
        """
        self.role = role
        self._experts_move = experts_move
        self.runner = runner
        # the checkpoint at the server's start
        self.checkpoint = runner.model_config.model_path
        self.configuration = StartConfiguration.of(runner)
        self._parameters = parameters
        self.forward_caches = forward_caches or ForwardCaches(runner.model)
        # called before each write of a parameter
        self.on_write: Callable[[], None] = _do_nothing
        # called with the numbers of audited tensors, and of those that differ from their plan
        self.on_audit: Callable[[int, int], None] = _count_nothing
        self._shadow: Shadow | FinishedModel | InPlaceModel | None = None
        # the model before loading, if SGLang finishes it after loading; None if it does not
        self._pristine: nn.Module | None = None
        self._recipe: Recipe | None = None
        # why the model's finishing cannot be repeated beside it, once that is known
        self.unproven: str | None = None
        self._proving: Proving[Recipe] | None = None
        self._may_be_proven_later = False
        self._plan: Plan | None = None
        # None before the first search for a plan
        self.ways: Ways | None = None
        self._is_unplannable = False
        self._finding: Proving[Plan] | None = None
        self._replay: Replay | None = None
        # memory of weights that another model owns, by ``memory_key``
        self._foreign: set[int] = set()
        # written since the start's or a commit's checkpoint, and what the open update writes: a
        # checkpoint, something else, or nothing (None)
        self._is_written_otherwise = False
        self._writes_checkpoint: bool | None = None
        self._is_partial = False
        # whether the model's loader has got a tensor of the open update
        self._was_asked = False
        self._form: Form | None = None
        self._checkpoint_shapes: Shapes | None = None
        self._kinds: dict[str, PlanKind] = {}
        self._quantizer = Quantizer({})
        # tensors of this update, held by the model's loader until others come
        self._held: dict[str, torch.Tensor] = {}
        self._tied = TiedHead()
        # memory of the weights written by this update
        self._written: set[int] = set()
        # names of what the loader has written besides weights, in any update
        self._derived_by_loads: set[str] = set()
        # the name of a derived tensor out of a commit's reach, once an update was refused for it
        self.derived: str | None = None

    def prepare_to_finish(self) -> None:
        """Construct the model a second time if SGLang finishes it after loading.

        Call on the scheduler's thread, before the first step.
        """
        model = self.runner.model
        if why_not_shadowed(model) is None or why_stale(model) is not None:
            return
        try:
            self._pristine = construct(self.runner)
        except Exception as error:
            logger.warning(
                "The %s model is updated in place: its class cannot be constructed again: %s",
                self.role,
                describe(error),
            )

    @property
    def finishes(self) -> bool:
        """Whether SGLang finishes the model after loading, and updates repeat that beside it."""
        return self._pristine is not None

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
        if self._pristine is None or self._recipe is not None:
            return
        if self.unproven is None or (again and self._may_be_proven_later):
            self.unproven = None
            self._prove(self._pristine, device, check, rate_limit, layout)
        if self.unproven is not None:
            raise Unproven(f"weights of the {self.role} model cannot be staged: {self.unproven}")

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
            if self._is_written_otherwise:
                raise NotNow(_WRITTEN_OTHERWISE)
            self._proving = self._proving or Proving(find, device)
            self._recipe = self._proving.result(check)
        except Dropped as dropped:
            raise Dropped(
                f"{dropped}. SGLang finishes the {self.role} model after loading, and the search "
                "for how goes on: send the update again"
            ) from dropped
        except Unproven as error:
            self.unproven, self._may_be_proven_later = str(error), isinstance(error, NotNow)
            logger.warning("The %s model is updated in place: %s", self.role, error)
        self._proving = None

    @property
    def may_be_proven_later(self) -> bool:
        """Whether the proof failed for a reason that may pass."""
        return self.unproven is not None and self._may_be_proven_later

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
        if self._plan is not None or self._experts_move or not self._kinds:
            return
        if self.ways is not None and (self._is_unplannable or self._is_written_otherwise):
            # the last search failed, and this one would
            return
        pristine, recipe = self._pristine, self._recipe

        def find(require_wanted: Callable[[], None]) -> Plan:
            pace = rate_limit.for_another_thread()
            pace.limit_this_thread()
            if rate_limit is not UNPACED and device.type == "cpu":
                use_one_core()
            model = self.runner.model
            name = self._name_recipe(pristine or model, layout)

            def read_served(needed: Container[str]) -> Weights:
                wants = needed.__contains__
                return self._read_start_checkpoint(require_wanted, pace, wants)

            def require_checkpoint() -> None:
                if self._is_written_otherwise:
                    raise NotNow(_WRITTEN_OTHERWISE)

            if pristine is None:
                weights, restrict = dict(weights_of(model)), _do_nothing_with
            else:
                assert recipe is not None
                weights = plannable(model, recipe)
                restrict = functools.partial(leave_torn, recipe=recipe, weights=weights)
            return find_plan(
                pristine or model,
                weights,
                self._kinds,
                name,
                require_checkpoint,
                read_served,
                require_wanted,
                pace,
                restrict=restrict,
            )

        self._finding = self._finding or Proving(find, device)
        try:
            self._plan = self._finding.result(check)
            self.ways = self._plan.ways(finishes=self.finishes)
        except Dropped as dropped:
            raise Dropped(
                f"{dropped}. The search for where the {self.role} model's tensors go goes on: send "
                "the update again"
            ) from dropped
        except Exception as error:
            self._is_unplannable = not isinstance(error, NotNow)
            # one reason for all
            why = str(error) if isinstance(error, Refused) else describe(error)
            self.ways = Plan(self._kinds, {}, dict.fromkeys(self._kinds, why), {}).ways(
                finishes=self.finishes
            )
            logger.warning(
                "All tensors of the %s model go by its loader: %s",
                self.role,
                why,
                exc_info=not isinstance(error, Refused),
            )
        self._finding = None

    def stop_proving(self) -> None:
        """End the searches that go on, before the served weights are written or released."""
        for search in (self._proving, self._finding):
            if search is not None:
                search.stop()
        self._proving = self._finding = None

    def note_commit(self, *, rolls_back: bool) -> None:
        """Note that other weights are served. The scheduler's thread calls it.

        ``rolls_back``: those before the last update's. No job runs meanwhile. A search may outlive
        its update, and must not compare a checkpoint with what is served from now on.
        """
        if self._finding is not None:
            self._finding.give_up()
            self._finding = None
        if rolls_back:
            self._is_written_otherwise = True
        elif self._writes_checkpoint is not None:
            self._is_written_otherwise = not self._writes_checkpoint
            self._writes_checkpoint = None

    def _find_recipe(
        self,
        pristine: nn.Module,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
    ) -> Recipe:
        model = self.runner.model
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
                self.forward_caches.memory_after_loading(),
                check,
            )
        if name is not None:
            remember(name, found)
        return found

    def _name_recipe(self, pristine: nn.Module, layout: Mapping[str, str]) -> str | None:
        config = self.runner.model_config
        cache = self.runner.load_config.download_dir
        try:
            folder = find_checkpoint(config.model_path, config.revision, cache)
            ranks = get_parallel()
            place = self.role, f"tp {ranks.tp_rank}/{ranks.tp_size}", f"pp {ranks.pp_rank}"
            args = self.runner.server_args
            return name_recipe(folder, pristine, self.runner.model, place, layout, args)
        except OSError as error:
            logger.warning("The recipe of the %s model is not remembered: %s", self.role, error)
            return None

    @property
    def proof(self) -> Proof | None:
        """Whether finishing was repeated beside the served model; None if there is no need."""
        if self._pristine is None:
            return None
        if self.unproven is not None:
            return Proof(state="failed", why=self.unproven)
        return Proof(state="due" if self._recipe is None else "done")

    def _read_start_checkpoint(
        self,
        check: Callable[[], None],
        rate_limit: RateLimit,
        wants: Callable[[str], bool] | None = None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from read_disk(
            DiskSource(model_path=self.runner.model_config.model_path),
            self.runner,
            refuse_another=functools.partial(self.refuse_another, warn=logger.warning),
            check=check,
            rate_limit=rate_limit,
            wants=wants,
        )

    def refuse_another(self, folder: Folder, warn: Callable[[str], None]) -> None:
        """Raise ``Refused`` if ``folder`` is another model's checkpoint (``check_configuration``).

        A draft loads its part of its target's checkpoint.
        """
        if self.role == "target":
            check_configuration(folder, self.runner, self.configuration, warn)

    def build_shadow(
        self,
        mode: StagingMode,
        device: torch.device,
        owners: Sequence[nn.Module],
        form: Form,
        rate_limit: RateLimit,
    ) -> None:
        """Build the shadow at the first update: a server without updates pays nothing.

        ``owners`` are the rank's models before this model. They own the weights shared with it.
        """
        if self._shadow is not None:
            return
        self._form, self._rate_limit = form, rate_limit
        model = self.runner.model
        if mode is StagingMode.OFF:
            self._shadow = InPlaceModel(
                model,
                device,
                finishes=why_not_shadowed(model) is not None,
                holds_graphs=_holds_graphs(self.runner),
                owners=owners,
            )
            return
        storage = torch.device("cpu") if mode is StagingMode.HOST else device
        if self._pristine is not None:
            assert self._recipe is not None
            self._shadow = FinishedModel(
                self._pristine,
                model,
                self._recipe,
                self._parameters,
                form,
                device=device,
                storage=storage,
                rate_limit=rate_limit,
                holds_graphs=_holds_graphs(self.runner),
                owners=owners,
            )
        else:
            refuse_shared_memory(model)
            self._shadow = Shadow(model, self._parameters, storage, form.handle_for)
            self._foreign = memory_of(owners)

    @property
    def shadow(self) -> Shadow | FinishedModel | InPlaceModel:
        assert self._shadow is not None
        return self._shadow

    def forget_loaded(self) -> None:
        """Give back what a dropped update has loaded, and not staged."""
        self._held.clear()
        if self._replay is not None:
            self._replay.forget()
        if isinstance(self._shadow, FinishedModel):
            self._shadow.forget()

    @property
    def was_written(self) -> bool:
        """Whether the open update has written the model in place, finished or not."""
        return isinstance(self._shadow, InPlaceModel) and self._shadow.was_written

    def forget_shadow(self) -> None:
        """Forget the shadow; the next update builds it anew. ``ShadowParameters`` frees memory."""
        self._shadow = self._form = self._replay = None

    @property
    def holds_graphs(self) -> bool:
        """Whether captured graphs hold addresses of the model's tensors."""
        return _holds_graphs(self.runner)

    @property
    def _recorder(self) -> Recorder | None:
        if isinstance(self._shadow, FinishedModel):
            # the loader writes raw weights
            return None
        return self._form.recorder if self._form is not None else None

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.runner.model.parameters())

    # ---- served tensors, saved and loaded as they are ---------------------------------

    def live_tensors(self, owners: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
        """Return the name and the served tensor of all that an update's digest covers.

        ``owners`` are the rank's models before this model. Raises ``Refused`` if SGLang has
        finished the model in a way that is not known.
        """
        model = self.runner.model
        if self._recipe is not None:
            found = live_tensors_of(model, self._recipe, owners)
            within = without_views(found)
            return [(str(place), t) for place, t in found.items() if within[place] == place]
        if self.finishes and self.unproven is None:
            raise Conflict(
                f"SGLang has finished the {self.role} model after loading it, and no update has "
                "shown yet what that makes: SGLANG_INFLIGHT_PROOF=start finds it out at the start"
            )
        if (reason := why_not_shadowed(model)) is not None:
            raise Refused(
                f"weights of the {self.role} model cannot be exchanged with another server as they "
                f"are: {self.unproven or reason}"
            )
        return list(weights_of(model))

    def live_numbers(self) -> dict[Place, Number] | None:
        """Return the served numbers that finishing makes; None if it makes none."""
        return live_numbers(self.runner.model, self._recipe) if self._recipe else None

    def refuse_underivable(self, check: Callable[[], None], *, loads_are_known: bool) -> None:
        """Raise ``Refused`` if the served model has what its loader computed besides weights.

        Another server takes the weights without a loader, and recomputes what ``refresh_derived``
        knows. So the loader runs on tensors without memory, and its writes are followed.
        ``loads_are_known``: updates have brought all weights, and their writes were followed.
        """
        if self._recipe is not None:
            return
        with AbandonableThread(check) as thread:
            stored, _ = thread.do(self._read_checkpoint)
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        model = self.runner.model
        found = find_loader_reads(model, shapes, next(model.parameters()).dtype)
        derived = found.derived | self._derived_by_loads
        if derived and (derived := derived - find_refreshed(model)):
            raise Refused(
                f"the {self.role} model's loader computes {list_names(sorted(derived))} besides "
                "the weights, and another server could not"
            )
        if not loads_are_known and (not shapes or found.weights_left_out is None):
            raise Refused(
                f"nothing shows whether the {self.role} model's loader computes something besides "
                "the weights: its checkpoint is not on this machine in safetensors, or its loader "
                "cannot be followed"
            )

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        """Stage ``new``, of the layout of ``weight``, for all of it, past the model's loader."""
        assert self._form is not None
        if self._replay is not None:
            self._replay.give_up(weight.name)
        if isinstance(self.shadow, FinishedModel):
            self.shadow.take_saved({weight.name: new}, {})
            return
        self._writes_checkpoint = False
        self._form.put(weight, new)
        self._written.add(memory_key(weight.shadow))

    def take_saved_numbers(self, numbers: Mapping[str, Number]) -> None:
        """Stage the numbers that finishing has made, by place. Raises ``Refused`` for others."""
        if isinstance(self.shadow, FinishedModel):
            self.shadow.take_saved({}, numbers)
        elif numbers:
            raise Refused(f"the {self.role} model has no numbers made by finishing")

    def begin_writing_saved(self) -> None:
        """Prepare the live model for tensors that are written past its loader."""
        assert isinstance(self.shadow, InPlaceModel)
        self._note_write_in_place(is_checkpoint=False)
        self.on_write()
        self.shadow.open()

    def _note_write_in_place(self, is_checkpoint: bool) -> None:
        assert isinstance(self.shadow, InPlaceModel)
        if not self.shadow.is_open:
            # no forward runs any more until the commit
            self.forward_caches.find()
        self._is_written_otherwise, self._writes_checkpoint = True, is_checkpoint

    def begin(self, *, is_partial: bool) -> None:
        """Begin an update: forget the tensors of the last one.

        ``is_partial``: elements that are not sent keep their values.
        """
        self._held.clear()
        self._written.clear()
        self._is_partial, self._writes_checkpoint = is_partial, None
        self._was_asked = False
        self._tied = TiedHead()
        self._quantizer.begin()
        if self._experts_move:
            # experts may have moved since the last update, and the loader uses others here
            self.__dict__.pop("_loader_reads", None)
        shadow = self.shadow
        if self._replay is None and self._plan is not None and not isinstance(shadow, InPlaceModel):
            self._replay = self._make_replay(self._plan, shadow)
        by_memory = None
        if isinstance(shadow, FinishedModel):
            # the weights of a module that another model owns are not finished here either
            planned = self._plan.writers if self._plan is not None else ()
            shadow.begin(is_partial=is_partial, planned=planned)
            by_memory = shadow.siblings(self._replay.places) if self._replay is not None else None
        else:
            shadow.begin()
        if self._replay is not None:
            self._replay.begin(keeps=is_partial, by_memory=by_memory)

    def _make_replay(self, plan: Plan, shadow: Shadow | FinishedModel) -> Replay:
        assert self._form is not None
        weights = {name: Weight(name, *both) for name, *both in shadow.pairs}
        owned = {name for name, w in weights.items() if memory_key(w.live) in self._foreign}
        if isinstance(shadow, FinishedModel):
            owned |= plan.writers.keys() - weights.keys()
        plan = plan.without(owned)
        audit = Audit(plan, self._pristine or self.runner.model, self._rate_limit)
        return Replay(plan, weights, self._form, audit, self._rate_limit)

    def _leave_to_loader(self, difference: Differs) -> None:
        """Let weights go by the loader from the next update on."""
        assert self._plan is not None
        self.on_audit(0, 1)
        logger.error("An update by the plan of the %s model was refused: %s", self.role, difference)
        for place in difference.places:
            self._plan.drop(place, "an update's audit has found a difference")
        if self._recipe is not None:
            weights = plannable(self.runner.model, self._recipe)
            leave_torn(self._plan, self._recipe, weights)
        self.ways = self._plan.ways(finishes=self.finishes)
        self._replay = None

    def expect(self, check: Callable[[], None]) -> None:
        """Make the form ready for all weights. ``check`` raises to give up."""
        if self._replay is not None:
            self._replay.expect(check)

    def is_planned(self, weight: str) -> bool:
        """Return whether the open update writes ``weight`` by moves alone, or not at all."""
        return self._replay is not None and self._replay.has(weight)

    def missing(self, weight: str) -> int:
        """Return how many elements of a planned ``weight`` the open update did not bring."""
        return self._replay.missing(weight) if self._replay is not None else 0

    def finish(self, *, was_loaded: bool = True) -> None:
        """Finish a model written in place. ``was_loaded``: the model's own loader wrote it."""
        # a model without a new tensor is finished already, and must not be finished twice
        if isinstance(self.shadow, InPlaceModel) and self.shadow.is_open:
            self.on_write()
            self.shadow.finish(was_loaded=was_loaded)
            self.forward_caches.note_loaded()

    def restore(self) -> None:
        """Undo SGLang's finishing, before a load or something else writes in place."""
        if isinstance(self.shadow, InPlaceModel) and self.shadow.finishes:
            self.on_write()
            self.shadow.restore()

    def refuse_if_unfinished(self) -> None:
        """Raise ``Refused`` if the next forward would not use a received tensor."""
        self._quantizer.refuse_parts()
        if self._held:
            raise Refused(
                f"the {self.role} model's loader takes {list_names(sorted(self._held))} only "
                "together with other tensors, which were not sent"
            )
        self._tied.refuse_if_not_the_embeddings()

    def refuse_if_derived(self) -> None:
        """Raise ``Refused`` if a loader wrote something out of a commit's reach."""
        if isinstance(self.shadow, FinishedModel):
            if self._written or (self._replay is not None and self._replay.has_moved):
                with torch.no_grad():
                    self.shadow.finish()
            return
        if isinstance(self.shadow, Shadow) and self._written:
            with torch.no_grad():
                self._refresh(self.shadow)
        if isinstance(self.shadow, Shadow) and not self._was_asked:
            return
        if (name := self.shadow.find_derived()) is not None:
            self.derived = name
            raise Refused(why_not_staged(self.role, name))

    def _refresh(self, shadow: Shadow) -> None:
        """Recompute the clone's tensors derived from weights."""
        with Dataflow(shadow.targets(), before_write=shadow.note_write, recorder=self._recorder):
            refresh_derived(shadow.model)

    def keep_weights_not_in_checkpoints(self, check: Callable[[], None]) -> None:
        """Stage the live values of weights that no checkpoint brings.

        All tensors of the start's checkpoint were received. So the model itself set any unwritten
        weight at its construction.
        """
        assert self._form is not None
        if self.finishes:
            # finishing has made them
            return
        for name, live, shadow in self.shadow.pairs:
            check()
            if memory_key(shadow) not in self._written and not self.is_planned(name):
                self._form.keep_if_unwritten(Weight(name, live, shadow))

    def read_checkpoint_shapes(self, check: Callable[[], None]) -> None:
        """Read ``checkpoint_shapes`` once; ``check`` raises when it is time to give up."""
        if self._checkpoint_shapes is None:
            with AbandonableThread(check) as thread:
                stored, config = thread.do(self._read_checkpoint)
            self._checkpoint_shapes = {name: tensor.shape for name, tensor in stored.items()}
            self._kinds = {name: PlanKind(*tensor) for name, tensor in stored.items()}
            self._quantizer = Quantizer(find_quantized(stored, config))

    @property
    def checkpoint_shapes(self) -> Shapes:
        """Shapes of the tensors in the start's checkpoint; empty if it is not on this machine."""
        assert self._checkpoint_shapes is not None
        return self._checkpoint_shapes

    def _read_checkpoint(self) -> tuple[dict[str, Stored], dict[str, Any]]:
        folder = find_checkpoint(
            self.checkpoint,
            revision=self.runner.model_config.revision,
            cache=self.runner.load_config.download_dir,
        )
        return read_stored(folder), read_quantization_config(folder)

    @property
    def _live_device(self) -> torch.device:
        return device_of(self.runner.model)

    @property
    def _ties_head(self) -> bool:
        config = self.runner.model_config
        return any(
            getattr(part, "tie_word_embeddings", False)
            for part in (config.hf_config, config.hf_text_config)
        )

    def load(
        self,
        source: LoadedSource,
        weights: Weights,
        *,
        takes_all: bool,
        check_finite: bool,
        rate_limit: RateLimit,
    ) -> TensorChecks:
        """Load ``weights`` through the model's own loader, and return the counts.

        ``takes_all`` is false if some of the tensors may be another model's.

        A loader may hold a tensor for a later one and forget it at the end of the call. Such a
        tensor is passed again in the update's next call.

        Torch's default dtype stays unchanged, though SGLang loads from disk under the model's
        dtype. The default belongs to the whole process: meanwhile the loop makes a request's
        biases in it, and compiles for it. SGLang loads tensors and broadcasts without it, too.
        """
        if isinstance(self.shadow, InPlaceModel):
            self._note_write_in_place(isinstance(source, DiskSource) and not self._is_partial)
        else:
            is_whole = isinstance(source, DiskSource) and not self._is_partial
            self._writes_checkpoint = is_whole and self._writes_checkpoint is not False
        load_format = source.load_format if isinstance(source, TensorSource) else None
        is_checkpoint = load_format in OF_CHECKPOINT
        if load_format == DIRECT:
            self._refuse_if_laid_out_anew()
        if is_sparse(source):
            if self.finishes:
                raise Refused(
                    f"load_format 'sparse': SGLang finishes the {self.role} model after loading, "
                    "and the loaded form of its weights is gone: send whole tensors"
                )
            # NaN is what was not sent
            check_finite = False
        dataflow = Dataflow(
            {},
            before_write=self._before_write,
            before_read=self._before_read if self._replay is not None else None,
            rate_limit=rate_limit,
            communicates=isinstance(self.shadow, InPlaceModel),
            is_sparse=is_sparse(source),
        )
        checks = TensorChecks(
            checkpoint_shapes=self.checkpoint_shapes if is_checkpoint else {},
            dataflow=dataflow,
            takes_all=takes_all and (is_checkpoint or load_format == DIRECT),
            takes_floats_only=why_not_shadowed(self.runner.model) is None,
            is_needed=self._is_needed if is_checkpoint else _needs_nothing,
            tied=self._tied if self._ties_head and is_checkpoint else None,
            check_finite=check_finite,
            rate_limit=rate_limit,
        )
        self._checks, self._is_sparse = checks, is_sparse(source)
        replay = self._replay if is_checkpoint else None
        if self._is_sparse:
            said = source.full_shapes if isinstance(source, DistributedSource) else {}
            found = pair_up(weights, self.checkpoint_shapes, said)
            weights = self._filled_in(found, replay, checks)
        weights = checks.count(weights)
        if is_checkpoint:
            weights = self._quantizer.quantize(
                weights,
                is_sparse=self._is_sparse,
                check_finite=check_finite,
                rate_limit=rate_limit,
                counts=checks.quantized,
            )
        if replay is not None and not self._is_sparse:
            replay.begin_call(check_finite=check_finite)
            weights = self._without_planned(weights, replay, checks)
        watched = checks.watch(weights, again=self._held)
        try:
            # Restoring may replace parameters, so restore before the loader looks them up. But
            # not before the first tensor: a failure until then has changed nothing.
            first = list(itertools.islice(watched, 1))
            if first:
                self.restore()
            if first or replay is None:
                self._was_asked = True
                with self._leaving_out_nan():
                    dataflow.aim_at(self.shadow.targets(), self._recorder)
                    with dataflow:
                        chained = itertools.chain(first, watched)
                        self._load(source, load_format, self._one_at_a_time(chained))
                        self._finish_complete()
            # a loader may stop before the end: check the rest, which is not loaded
            for _ in watched:
                pass
            if replay is not None:
                replay.end_call()
                self.on_audit(replay.audit.take_count(), 0)
            self._held = checks.finish()
            if self._is_sparse and self._held:
                raise Refused(
                    f"the {self.role} model's loader takes {list_names(sorted(self._held))} only "
                    "together with other tensors: send the sparse parts of all in one call"
                )
        except Differs as difference:
            self._leave_to_loader(difference)
            raise Refused(str(difference)) from None
        except Refused:
            # ``raise error from error`` would be a cycle and keep the tensors of its frames
            raise
        except Exception as error:
            if not checks.is_the_loaders_turn:
                raise
            raise checks.explain(error) from error
        finally:
            del self._checks, self._is_sparse
        return checks

    def _filled_in(
        self, found: Iterable[Sparse], replay: Replay | None, checks: TensorChecks
    ) -> Weights:
        """Move the planned ones of ``found``, and yield the others whole."""
        for sparse in found:
            if replay is not None and replay.take_sparse(sparse):
                checks.note_patched(sparse.name, sparse.indices.nbytes + sparse.values.nbytes)
            else:
                checks.note_magnitude(sparse.name, sparse.largest)
                yield sparse.name, sparse.fill_in()

    def _without_planned(self, weights: Weights, replay: Replay, checks: TensorChecks) -> Weights:
        """Move the planned ones of ``weights``, and yield the others."""
        for name, tensor in paced(weights):
            if (
                isinstance(name, str)
                and isinstance(tensor, torch.Tensor)
                and replay.take(name, tensor)
            ):
                checks.note_moved(name, tensor)
            else:
                yield name, tensor

    def _one_at_a_time(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            yield without_threads(name, tensor)
            self._finish_complete()

    def _finish_complete(self) -> None:
        if isinstance(self.shadow, FinishedModel):
            self.shadow.finish_complete()

    def _before_write(self, write: Write) -> None:
        if write.target.kind is Kind.DERIVED:
            self._derived_by_loads.add(write.target.name)
        if write.target.kind is Kind.DERIVED and self._is_sparse:
            raise Refused(
                f"load_format 'sparse': the model's loader computes {write.target.name!r} from "
                "what is sent: send whole tensors"
            )
        if write.target.kind is Kind.WEIGHT:
            self._checks.refuse_wrong_dtype(write)
            self._checks.refuse_too_large(write)
            if self._replay is not None:
                self._before_read(write.memory)
            self._written.add(write.memory)
        self.shadow.note_write(write)
        self.on_write()

    def _before_read(self, memory: int) -> None:
        assert self._replay is not None
        with Dataflow.untraced():
            left = self._replay.leave(memory)
        if isinstance(self.shadow, FinishedModel):
            self.shadow.leave(left)

    def _leaving_out_nan(self) -> AbstractContextManager[None]:
        assert self._form is not None
        return self._form.leaving_out_nan() if self._is_sparse else nullcontext()

    def _load(self, source: LoadedSource, load_format: str | None, weights: Weights) -> Any:
        model: Any = self.shadow.model
        if isinstance(source, DiskSource) and not isinstance(self.shadow, Shadow):
            # SGLang renames the tensors of some formats when it reads them from disk
            device = self._live_device
            return DefaultModelLoader.load_weights_only(model, weights, device)
        if load_format in OF_CHECKPOINT:
            return model.load_weights(weights)
        if load_format == DIRECT:
            return self._load_direct(weights)
        if load_format in self.runner.weight_updater.custom_weight_loaders:
            return dynamic_import(load_format)(model, weights)
        raise Refused(f"load_format {load_format!r} is not known for tensors")

    def _load_direct(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to the parameters of the same names. Shapes are those of this shard."""
        if isinstance(self.shadow, InPlaceModel):
            self.shadow.write_directly()
        parameters = dict(self.shadow.model.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)

    def _refuse_if_laid_out_anew(self) -> None:
        if not isinstance(self.shadow, Shadow):
            reason = why_laid_out_anew(self.runner.model)
            if reason is not None:
                raise Refused(
                    f"load_format {DIRECT!r} writes the parameters of the {self.role} model past "
                    f"SGLang's own loading, and {reason}: send the checkpoint's tensors without "
                    "load_format"
                )

    def _is_needed(self, name: str) -> bool:
        """Return whether the model's loader uses the tensor ``name`` of its checkpoint."""
        return name in self._loader_reads.tensors

    @property
    def set_by_the_model(self) -> frozenset[str]:
        """Names of persistent buffers set by the model at construction, in no checkpoint."""
        buffers = dict(self.runner.model.named_buffers())
        persistent = {name for name, _ in weights_of(self.runner.model) if name in buffers}
        if not persistent or not self.checkpoint_shapes:
            return frozenset()
        return (self._loader_reads.weights_left_out or frozenset()) & persistent

    @functools.cached_property
    def _loader_reads(self) -> LoaderReads:
        model = self._pristine if self._pristine is not None else self.runner.model
        return find_loader_reads(model, self.checkpoint_shapes, next(model.parameters()).dtype)


def why_not_updated(models: Sequence[ShadowedModel], *, in_place: bool) -> str | None:
    """Return why ``models`` cannot be updated now, or None if they can."""
    why_not, what = (why_not_loaded, "updated") if in_place else (why_not_shadowed, "staged")
    for model in models:
        if not in_place and model.derived is not None:
            return why_not_staged(model.role, model.derived)
        of_model = why_stale if not in_place and model.finishes else why_not
        if (reason := of_model(model.runner.model)) is not None:
            return f"weights of the {model.role} model cannot be {what}: {reason}"
    return why_forwards_forbid(models)


def why_forwards_forbid(models: Iterable[ShadowedModel]) -> str | None:
    """Return why what forwards have made of the weights forbids every update, or None."""
    for model in models:
        if (reason := model.forward_caches.why_not_updated()) is not None:
            return f"weights of the {model.role} model cannot be updated: {reason}"
    return None


def why_not_staged(role: str, derived: str) -> str:
    return (
        f"weights of the {role} model cannot be staged: loading them replaces {derived!r} too, "
        "which is no weight, and a commit would leave it as it was. SGLANG_INFLIGHT_STAGING=off "
        "writes them between two steps"
    )


def _holds_graphs(runner: ModelRunner) -> bool:
    """Return whether captured graphs hold addresses of the model's tensors."""
    runners = (getattr(runner, name, None) for name in _GRAPH_RUNNERS)
    return any(type(one).__name__ != "EagerRunner" for one in runners if one is not None)


# attributes of SGLang 0.5.23, then of 0.5.22
_GRAPH_RUNNERS = (
    "decode_cuda_graph_runner",
    "prefill_cuda_graph_runner",
    "graph_runner",
    "piecewise_cuda_graph_runner",
)


_WRITTEN_OTHERWISE = (
    "updates have written it since its checkpoint was loaded: a whole update from disk brings one "
    "to compare with"
)


def _needs_nothing(name: str) -> bool:
    return False


def _do_nothing_with(plan: Plan) -> None:
    pass


def _do_nothing() -> None:
    pass


def _count_nothing(audited: int, different: int) -> None:
    pass
