"""One model of a rank, the target or a draft, in updates."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.utils import dynamic_import
from torch import nn

from sglang_inflight.messages import (
    DIRECT,
    OF_CHECKPOINT,
    DiskSource,
    DistributedSource,
    LoadedSource,
    PartsSource,
    TensorSource,
    is_sparse,
)
from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.plans.audit import Audit, Differs
from sglang_inflight.scheduler.plans.bulk import Bulk
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind as PlanKind
from sglang_inflight.scheduler.plans.record import record
from sglang_inflight.scheduler.plans.recorder import Recorded
from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.checks.dataflow import (
    Dataflow,
    Kind,
    Write,
    without_threads,
)
from sglang_inflight.scheduler.update.checks.parts import refuse_parts, refuse_unused
from sglang_inflight.scheduler.update.checks.stageable import (
    why_laid_out_anew,
    why_not_loaded,
    why_not_shadowed,
    why_stale,
)
from sglang_inflight.scheduler.update.checks.tensors import (
    TensorChecks,
    TiedHead,
    may_be_tied,
)
from sglang_inflight.scheduler.update.digested_form import DigestedForm
from sglang_inflight.scheduler.update.findings import Findings
from sglang_inflight.scheduler.update.finished.finished_model import (
    FinishedModel,
    live_numbers,
    live_tensors_of,
    memory_of,
)
from sglang_inflight.scheduler.update.finished.places import Number, Place, without_views
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.in_place import InPlaceModel
from sglang_inflight.scheduler.update.kind_of_model import KindOfModel
from sglang_inflight.scheduler.update.loaded_model import Derives, LoadedModel
from sglang_inflight.scheduler.update.rate import RateLimit, paced
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.scheduler.update.sources.checkpoint_files import Shapes
from sglang_inflight.scheduler.update.sources.disk import Folder
from sglang_inflight.scheduler.update.sources.quantizing import Quantizer
from sglang_inflight.scheduler.update.sources.safetensors_file import EVERYTHING, Wanted
from sglang_inflight.scheduler.update.sources.safetensors_file import Place as StoredPlace
from sglang_inflight.scheduler.update.sources.sparse import Sparse, find_largest, pair_up
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Refused,
    list_names,
)
from sglang_inflight.vocabulary.regions import Region

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Weights = Iterator[tuple[str, torch.Tensor]]


class ShadowedModel:
    """Loads the tensors of updates for one model. Used on the staging thread."""

    def __init__(
        self,
        role: str,
        runner: ModelRunner,
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
        self.forward_caches = forward_caches or ForwardCaches(runner.model)
        self.findings = Findings(role, runner, self.forward_caches)
        # called before each write of a parameter
        self.on_write: Callable[[], None] = _do_nothing
        # called with the numbers of audited tensors, and of those that differ from their plan
        self.on_audit: Callable[[int, int], None] = _count_nothing
        self._kind: KindOfModel | None = None
        self._replay: Replay | None = None
        # set while a load reads tensors of a checkpoint
        self._takes_bulk: Replay | None = None
        # names of weights that another model owns
        self._foreign: frozenset[str] = frozenset()
        # what the open update writes: a checkpoint, something else, or nothing (None)
        self._writes_checkpoint: bool | None = None
        self._is_partial = False
        self._form: DigestedForm | None = None
        # raises if the update was dropped, while a load reads. It has the update and its changes
        self._check: Callable[[], None] = _do_nothing
        self._quantizer = Quantizer({})
        # tensors of this update, held by the model's loader until others come
        self._held: dict[str, torch.Tensor] = {}
        self._tied = TiedHead()
        self._is_shadowed: bool | None = None
        # names of what the loader has written besides weights, in any update
        self._derived_by_loads: set[str] = set()
        # the name of a derived tensor out of a commit's reach, once an update was refused for it
        self.derived: str | None = None

    @property
    def wanted(self) -> Wanted:
        """The stored tensors that the open update reads from a checkpoint on disk."""
        replay = self._replay
        if replay is None:
            return EVERYTHING
        ties = self._ties_head

        def reads(stored: StoredPlace) -> bool:
            if ties and may_be_tied(stored.name):
                return True
            return replay.needs(stored.name, stored.shape, stored.dtype)

        # what came before is read if it comes again
        return Wanted(reads, None if replay.has_moved else replay)

    @property
    def parts(self) -> Mapping[str, Region]:
        """The part of each tensor of the checkpoint that this rank uses, since the last update.

        Tensors that it does not use at all are missing. Raises ``Conflict`` if no update has begun,
        and ``Refused`` if no one knows the checkpoint's tensors.
        """
        findings = self.findings
        # in place a plan moves parts of tensors alone
        is_planned = findings.plan is not None and self._form is not None
        if self._kind is None or (is_planned and self._replay is None):
            raise Conflict(
                f"nothing has found yet what this rank uses of the {self.role} model's tensors: "
                "begin an update first"
            )
        if not findings.kinds:
            raise Refused(
                f"the {self.role} model's checkpoint is not on this machine in safetensors, so "
                "nothing says which part of its tensors this rank uses: send whole tensors"
            )
        return findings.whole if self._replay is None else self._replay.parts.wanted

    def take(self, stretch: Stretch, row: torch.Tensor | None) -> Bulk | None:
        """Move the planned tensors of a stretch, as ``Replay.take_bulk`` does.

        Call it while ``load`` reads.
        """
        if self._takes_bulk is None or not self._quantizer.takes_bulk:
            return None
        if (bulk := self._takes_bulk.take_bulk(stretch, row)) is not None:
            self._quantizer.note_stored(bulk.names)
            self._checks.note_bulk(bulk.names, bulk.nbytes)
        return bulk

    def build(
        self,
        device: torch.device,
        owners: Sequence[nn.Module],
        form: DigestedForm | None,
        rate_limit: RateLimit,
        scratch_bytes: int,
        *,
        check_finite: bool,
    ) -> None:
        """Build what updates load into, at the first one: a server without updates pays nothing.

        ``owners`` are the rank's models before this model. They own the weights shared with it.
        ``form``: None in the mode ``off``. ``check_finite``: tensors with NaN are refused.
        """
        if self._kind is not None:
            return
        self._form, self._rate_limit = form, rate_limit
        model = self.runner.model
        memory, ids = memory_of(owners), {id(w) for o in owners for _, w in weights_of(o)}
        self._foreign = frozenset(
            name for name, w in weights_of(model) if id(w) in ids or memory_key(w) in memory
        )
        if form is None:
            self._kind = InPlaceModel(
                model,
                device,
                finishes=why_not_shadowed(model) is not None,
                holds_graphs=_holds_graphs(self.runner),
                owners=owners,
                on_announce=self._note_announced,
                on_write=lambda: self.on_write(),
                on_finish=self.forward_caches.note_loaded,
            )
        elif self.findings.pristine is not None:
            assert self.findings.recipe is not None
            self._kind = FinishedModel(
                self.findings.pristine,
                model,
                self.findings.recipe,
                form,
                device=device,
                rate_limit=rate_limit,
                holds_graphs=_holds_graphs(self.runner),
                owners=owners,
                check_finite=check_finite,
            )
        else:
            self._kind = LoadedModel(
                model, self._foreign, form, rate_limit, scratch_bytes, check_finite=check_finite
            )

    @property
    def kind(self) -> KindOfModel:
        assert self._kind is not None
        return self._kind

    def refuse_another(self, folder: Folder, warn: Callable[[str], None]) -> None:
        """Raise ``Refused`` if ``folder`` has another model's checkpoint."""
        self.findings.refuse_another(folder, warn)

    def forget_loaded(self) -> None:
        """Give back what a dropped update has loaded, and not staged."""
        self._held.clear()
        if self._replay is not None:
            self._replay.forget()
        if self._kind is not None:
            self._kind.forget()

    @property
    def was_written(self) -> bool:
        """Whether the open update has written the model in place, finished or not."""
        return self._kind is not None and self._kind.was_written

    def forget_built(self) -> None:
        """Forget what ``build`` has made; the next update builds it anew."""
        self._kind = self._form = self._replay = None

    @property
    def holds_graphs(self) -> bool:
        """Whether captured graphs hold addresses of the model's tensors."""
        return _holds_graphs(self.runner)

    @property
    def names(self) -> Set[str]:
        """Names of the tensors in the start's checkpoint; none if it is not on this machine."""
        return self.findings.checkpoint_shapes.keys()

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
        if self.findings.recipe is not None:
            found = live_tensors_of(model, self.findings.recipe, owners)
            within = without_views(found)
            return [(str(place), t) for place, t in found.items() if within[place] == place]
        if self.findings.finishes and self.findings.unproven is None:
            raise Conflict(
                f"SGLang has finished the {self.role} model after loading it, and no update has "
                "shown yet what that makes: SGLANG_INFLIGHT_PROOF=start finds it out at the start"
            )
        if (reason := why_not_shadowed(model)) is not None:
            raise Refused(
                f"weights of the {self.role} model cannot be exchanged with another server as they "
                f"are: {self.findings.unproven or reason}"
            )
        return list(weights_of(model))

    def live_numbers(self) -> dict[Place, Number] | None:
        """Return the served numbers that finishing makes; None if it makes none."""
        return (
            live_numbers(self.runner.model, self.findings.recipe) if self.findings.recipe else None
        )

    def refuse_underivable(self, check: Callable[[], None], *, loads_are_known: bool) -> None:
        """Raise ``Refused`` if the served model has what its loader computed besides weights.

        Another server takes the weights without a loader, and recomputes what ``refresh_derived``
        knows. So the loader runs on tensors without memory, and its writes are followed.
        ``loads_are_known``: updates have brought all weights, and their writes were followed.
        """
        if self.findings.recipe is not None:
            return
        shapes = self.findings.shapes_now(check)
        found = self._record(shapes)
        if derived := (found.derived | self._derived_by_loads) - found.refreshed:
            raise Refused(
                f"the {self.role} model's loader computes {list_names(sorted(derived))} besides "
                "the weights, and another server could not"
            )
        if not loads_are_known and (not shapes or found.unwritten is None):
            raise Refused(
                f"nothing shows whether the {self.role} model's loader computes something besides "
                "the weights: its checkpoint is not on this machine in safetensors, or its loader "
                "cannot be followed"
            )

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        """Take ``new``, of the layout of ``weight``, for all of it, past the model's loader."""
        if self._replay is not None:
            self._replay.give_up(weight.name)
        self._writes_checkpoint = False
        self.kind.take_saved(weight, new)

    def take_saved_numbers(self, numbers: Mapping[str, Number]) -> None:
        """Stage the numbers that finishing has made, by place. Raises ``Refused`` for others."""
        self.kind.take_saved_numbers(numbers)

    def _note_announced(self) -> None:
        """Note that an update is about to write the served model."""
        # no forward runs any more until the commit
        self.forward_caches.find()
        self.findings.is_written_otherwise = True

    def begin(self, *, is_partial: bool) -> None:
        """Begin an update: forget the tensors of the last one.

        ``is_partial``: elements that are not sent keep their values.
        """
        self._held.clear()
        self._is_partial, self._writes_checkpoint = is_partial, None
        self._tied = TiedHead()
        self._is_shadowed = None
        self._quantizer.begin()
        if self._experts_move:
            # experts may have moved since the last update, and the loader uses others here
            self.__dict__.pop("_recorded", None)
        if self._replay is None and self.findings.plan is not None and self._form is not None:
            self._replay = self._make_replay(self.findings.plan, self._form, self._read_early)
        if self._replay is not None:
            self._replay.begin()
        self.kind.begin(self._replay, is_partial=is_partial)

    def _read_early(self, weight: Weight) -> None:
        """Read a weight for the digest while the next tensors are on their way."""
        assert self._form is not None
        self._form.read_early(f"{self.role}.{weight.name}", weight, self._check)

    def _make_replay(self, plan: Plan, form: Form, on_whole: Callable[[Weight], None]) -> Replay:
        # a finished model's weights that another one owns are not among its own
        weights = {weight.name: weight for weight in self.kind.weights}
        planned = frozenset(plan.writers)
        plan = plan.without(self._foreign | (planned - weights.keys()))
        audit = Audit(plan, self.findings.pristine or self.runner.model, self._rate_limit)
        return Replay(plan, weights, form, audit, self._rate_limit, planned, on_whole)

    def _leave_to_loader(self, difference: Differs) -> None:
        """Let weights go by the loader from the next update on."""
        assert self.findings.plan is not None
        self.on_audit(0, 1)
        logger.error("An update by the plan of the %s model was refused: %s", self.role, difference)
        for place in difference.places:
            self.findings.plan.drop(place, "an update's audit has found a difference")
        if self.findings.recipe is not None:
            weights = plannable(self.runner.model, self.findings.recipe)
            leave_torn(self.findings.plan, self.findings.recipe, self.runner.model, weights)
        self.findings.ways = self.findings.plan.ways(finishes=self.findings.finishes)
        self._replay = None

    def expect(self, check: Callable[[], None]) -> None:
        """Make the form ready for all weights. ``check`` raises to give up."""
        assert self._form is not None
        for weight in self.kind.weights:
            check()
            if weight.name not in self._foreign:
                is_whole = self._replay is not None and self._replay.is_whole(weight.name)
                self._form.expect(weight, keeps=self._is_partial or not is_whole)

    def missing(self, weight: Weight, *, came_all: bool) -> int:
        """Return how many elements of ``weight`` the open update did not bring.

        ``came_all``: all tensors of the start's checkpoint came. The model itself has set a weight
        that none of them wrote, at its construction.
        """
        if self._replay is not None and self._replay.has(weight.name):
            return self._replay.missing(weight.name)
        unwritten = self.kind.unwritten(weight.name)
        return 0 if came_all and unwritten == weight.live.numel() else unwritten

    def seal(self, *, was_loaded: bool) -> None:
        """Make what the update makes of its tensors. Raise ``Refused`` if it has no use for one.

        ``was_loaded`` is false if no tensor came, and something else wrote the served model.
        """
        try:
            self.kind.seal(was_loaded=was_loaded)
        except Derives as derives:
            self.derived = derives.name
            raise Refused(why_not_staged(self.role, derives.name)) from None

    def restore(self) -> None:
        """Undo SGLang's finishing, before something else writes in place."""
        self.kind.restore()

    def refuse_if_unfinished(self) -> None:
        """Raise ``Refused`` if the next forward would not use a received tensor."""
        self._quantizer.refuse_parts()
        if self._held:
            raise Refused(
                f"the {self.role} model's loader takes {list_names(sorted(self._held))} only "
                "together with other tensors, which were not sent"
            )
        self._tied.refuse_if_not_the_embeddings()

    def read_checkpoint(self, check: Callable[[], None]) -> None:
        """Read once what the start's checkpoint has. ``check`` raises to give up."""
        if (quantized := self.findings.read_checkpoint(check)) is not None:
            self._quantizer = Quantizer(quantized)

    def note_commit(self, *, rolls_back: bool) -> None:
        """Note that other weights are served. The scheduler's thread calls it, while no job runs.

        ``rolls_back``: those before the last update's.
        """
        self.findings.note_commit(False if rolls_back else self._writes_checkpoint)
        if not rolls_back:
            self._writes_checkpoint = None

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
        check: Callable[[], None],
    ) -> TensorChecks:
        """Load ``weights`` through the model's own loader, and return the counts.

        ``takes_all`` is false if some of the tensors may be another model's. ``check`` raises to
        give up.

        A loader may hold a tensor for a later one and forget it at the end of the call. Such a
        tensor is passed again in the update's next call.

        Torch's default dtype stays unchanged, though SGLang loads from disk under the model's
        dtype. The default belongs to the whole process: meanwhile the loop makes a request's
        biases in it, and compiles for it. SGLang loads tensors and broadcasts without it, too.
        """
        kind = self.kind
        kind.announce()
        is_whole = isinstance(source, DiskSource) and not self._is_partial
        self._writes_checkpoint = is_whole and self._writes_checkpoint is not False
        load_format = source.load_format if isinstance(source, TensorSource) else None
        is_checkpoint = load_format in OF_CHECKPOINT
        if load_format == DIRECT:
            self._refuse_if_laid_out_anew()
        dataflow = Dataflow(
            {},
            before_write=self._before_write,
            rate_limit=rate_limit,
            communicates=kind.communicates,
        )
        by_parts = isinstance(source, PartsSource) and not is_sparse(source)
        shapes = self.findings.checkpoint_shapes if is_checkpoint else {}
        if by_parts:
            shapes = {name: torch.Size(part.sizes) for name, part in self.parts.items()}
        checks = TensorChecks(
            checkpoint_shapes=shapes,
            dataflow=dataflow,
            takes_all=takes_all and (is_checkpoint or load_format == DIRECT),
            takes_floats_only=self._takes_floats_only,
            is_needed=self._is_needed if is_checkpoint else _needs_nothing,
            tied=self._tied if self._ties_head and is_checkpoint else None,
            check_finite=check_finite,
            rate_limit=rate_limit,
        )
        replay = self._replay if is_checkpoint else None
        if replay is not None:
            replay.begin_call(check_finite=check_finite, by_parts=by_parts)
        if is_sparse(source):
            said = source.full_shapes if isinstance(source, DistributedSource) else {}
            found = pair_up(weights, self.findings.checkpoint_shapes, said)
            self._take_sparse(found, replay or self._replay_in_place(check_finite), checks)
            return checks
        self._checks = checks
        self._takes_bulk, self._check = replay, check
        weights = checks.count(weights)
        if by_parts:
            weights = refuse_unused(weights, self.parts, self.findings.kinds)
        elif is_checkpoint:
            weights = self._quantizer.quantize(
                weights,
                check_finite=check_finite,
                rate_limit=rate_limit,
                counts=checks.quantized,
            )
        if replay is not None:
            weights = self._without_planned(weights, replay, checks)
        if by_parts:
            weights = refuse_parts(weights, self.findings.kinds, self.role)
        watched = checks.watch(weights, again=self._held)
        try:
            # Restoring may replace parameters, so restore before the loader looks them up. But
            # not before the first tensor: a failure until then has changed nothing.
            first = list(itertools.islice(watched, 1))
            if first:
                kind.restore()
                dataflow.aim_at(kind.targets(), kind.recorder)
                with dataflow:
                    chained = itertools.chain(first, watched)
                    self._load(source, load_format, self._one_at_a_time(chained))
                    kind.finish_complete()
                kind.end_call()
            # a loader may stop before the end: check the rest, which is not loaded
            for _ in watched:
                pass
            if replay is not None:
                replay.end_call()
                self.on_audit(replay.audit.take_count(), 0)
            self._held = checks.finish()
            if by_parts:
                # nothing of the others is ever sent
                checks.names |= self.findings.kinds.keys() - self.parts.keys()
                # another call may bring changes of the scales of a weight that came here
                self._quantizer.note_stored(frozenset(checks.names))
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
            del self._checks
            self._takes_bulk, self._check = None, _do_nothing
        return checks

    @property
    def _takes_floats_only(self) -> bool:
        """Whether the weights are not quantized. Found once in an update: it walks the model."""
        if self._form is not None and not self.findings.finishes:
            # else the update was refused at its begin
            return True
        if self._is_shadowed is None:
            self._is_shadowed = why_not_shadowed(self.runner.model) is None
        return self._is_shadowed

    def _take_sparse(
        self, found: Iterable[Sparse], replay: Replay | None, checks: TensorChecks
    ) -> None:
        """Move the planned ones of ``found``, and note the others: they have to come whole."""
        # tensors of one module have the same set, of a thousand names with experts
        others: dict[int, Set[str]] = {}
        for sparse in found:
            if replay is not None and replay.take_sparse(sparse):
                self._quantizer.note_patched(sparse.name)
                checks.note_patched(sparse.name, sparse.indices.nbytes + sparse.values.nbytes)
            else:
                find_largest(sparse)
                together = self._together(sparse.name)
                others[id(together)] = together
        checks.unpatched.update(*others.values())
        if replay is not None:
            replay.end_call()

    def find_plan_in_place(
        self,
        device: torch.device,
        check: Callable[[], None],
        rate_limit: RateLimit,
        layout: Mapping[str, str],
    ) -> None:
        """Find the plan by which parts of tensors are written in place: ``Findings.find_plan``.

        A model that SGLang has finished takes none.
        """
        if why_not_shadowed(self.runner.model) is None:
            self.findings.find_plan(device, check, rate_limit, layout)

    def _replay_in_place(self, check_finite: bool) -> Replay | None:
        plan = self.findings.plan
        if self._form is not None or plan is None or self.findings.finishes:
            return None
        replay = self._make_replay(plan, self.kind.form, _take_no_note)
        replay.begin()
        replay.begin_call(check_finite=check_finite)
        return replay

    def _together(self, name: str) -> Set[str]:
        """Return the names of the tensors that are loaded only together with one of that name."""
        if self.findings.recipe is not None:
            return self.findings.recipe.together.get(name, {name})
        return self.findings.plan.unit_of(name) if self.findings.plan is not None else {name}

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
            self.kind.finish_complete()

    def _before_write(self, write: Write) -> None:
        if write.target.kind is Kind.DERIVED:
            self._derived_by_loads.add(write.target.name)
        if write.target.kind is Kind.WEIGHT:
            self._checks.refuse_wrong_dtype(write)
            self._checks.refuse_too_large(write)
        self.kind.note_write(write)
        self.on_write()

    def _load(self, source: LoadedSource, load_format: str | None, weights: Weights) -> Any:
        if load_format in OF_CHECKPOINT:
            return self.kind.load(weights, from_disk=isinstance(source, DiskSource))
        if load_format == DIRECT:
            return self._load_direct(weights)
        if load_format in self.runner.weight_updater.custom_weight_loaders:
            return dynamic_import(load_format)(self.kind.model, weights)
        raise Refused(f"load_format {load_format!r} is not known for tensors")

    def _load_direct(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to the parameters of the same names. Shapes are those of this shard."""
        self.kind.write_directly()
        parameters = dict(self.kind.model.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)

    def _refuse_if_laid_out_anew(self) -> None:
        if (reason := why_laid_out_anew(self.runner.model)) is not None:
            raise Refused(
                f"load_format {DIRECT!r} writes the parameters of the {self.role} model past "
                f"SGLang's own loading, and {reason}: send the checkpoint's tensors without "
                "load_format"
            )

    def _is_needed(self, name: str) -> bool:
        """Return whether the model's loader uses the tensor ``name`` of its checkpoint."""
        return name in self._recorded.reached

    @property
    def set_by_the_model(self) -> frozenset[str]:
        """Names of persistent buffers set by the model at construction, in no checkpoint."""
        buffers = dict(self.runner.model.named_buffers())
        persistent = {name for name, _ in weights_of(self.runner.model) if name in buffers}
        if not persistent or not self.findings.checkpoint_shapes:
            return frozenset()
        return (self._recorded.unwritten or frozenset()) & persistent

    @functools.cached_property
    def _recorded(self) -> Recorded:
        return self._record(self.findings.checkpoint_shapes)

    def _record(self, shapes: Shapes) -> Recorded:
        model = self.findings.pristine if self.findings.pristine is not None else self.runner.model
        dtype = next(model.parameters()).dtype
        return record(model, {name: PlanKind(shape, dtype) for name, shape in shapes.items()})


def why_not_updated(models: Sequence[ShadowedModel], *, in_place: bool) -> str | None:
    """Return why ``models`` cannot be updated now, or None if they can."""
    why_not, what = (why_not_loaded, "updated") if in_place else (why_not_shadowed, "staged")
    for model in models:
        if not in_place and model.derived is not None:
            return why_not_staged(model.role, model.derived)
        of_model = why_stale if not in_place and model.findings.finishes else why_not
        if (reason := of_model(model.runner.model)) is not None:
            return f"weights of the {model.role} model cannot be {what}: {reason}"
    # a search takes as long as many tensors, and a staged update has one at its seal
    return why_forwards_forbid(models, searches=in_place)


def why_forwards_forbid(models: Iterable[ShadowedModel], *, searches: bool = True) -> str | None:
    """Return why what forwards have made of the weights forbids every update, or None."""
    for model in models:
        if (reason := model.forward_caches.why_not_updated(searches=searches)) is not None:
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


def _needs_nothing(name: str) -> bool:
    return False


def _do_nothing() -> None:
    pass


def _take_no_note(weight: Weight) -> None:
    pass


def _count_nothing(audited: int, different: int) -> None:
    pass
