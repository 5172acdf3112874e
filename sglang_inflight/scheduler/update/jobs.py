"""The jobs of an update: prepare, fill and seal the shadow while decoding goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_inflight.joints import Joint
from sglang_inflight.messages import (
    SERVED_ELSEWHERE,
    AskedDigests,
    DiskSource,
    Opened,
    Selector,
    ServedSource,
    Source,
    Staged,
    Voted,
    is_sparse,
)
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.checks.arrivals import Arrivals
from sglang_inflight.scheduler.update.checks.coverage import (
    can_mark,
    count_marked,
    mark,
)
from sglang_inflight.scheduler.update.checks.digest import digest_of
from sglang_inflight.scheduler.update.digested_form import read_paced
from sglang_inflight.scheduler.update.finished.kv_scales import (
    are_copied,
    describe_change,
    is_kv_scale,
    kv_scales_of,
)
from sglang_inflight.scheduler.update.finished.places import Number, Place
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadowed_model import (
    ShadowedModel,
    why_forwards_forbid,
    why_not_updated,
)
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.reading import Reader
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.scheduler.update.update import Sealed, Update
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.scheduler.update.whole_loader import WholeLoader
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest, digest_of_all
from sglang_inflight.vocabulary.answers import Proof, Ways
from sglang_inflight.vocabulary.errors import Conflict, Refused, list_names

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


# the one that loads weights as another server serves them, if an extension brings it
WHOLE_LOADERS: Joint[WholeLoader] = Joint("whole loaders")


class Jobs:
    """The jobs of updates. The staging thread runs them one after the other.

    While an update is open, its jobs own the shadow. The seal hands the shadow to the scheduler's
    thread, as the update's ``Sealed``. Between two tensors a job checks whether its update was
    dropped, and then gives up. The data of a dropped update are never committed.

    In the mode ``off`` jobs write the live weights, so they run on the scheduler's thread, at the
    boundary. Hollow weights are written in place too, but on the staging thread: no step runs
    before the weights are complete. The first update marks every element of hollow weights. So
    several partial updates can make a whole version, and the marks left show the missing elements.
    An update whose changes outgrew their memory is written in place, too, if the front end asks for
    it. ``Staging`` then holds the loop until its commit.

    In a session of SGLang's own kind no tensor may come at all. Something else has then written
    the live weights by the seal, and the seal reads them as they are.

    Tests inject failures in ``fill``, ``take_in``, ``take_bulk`` or ``seal``.
    """

    def __init__(
        self,
        models: Sequence[ShadowedModel],
        shadows: Shadows,
        groups: Groups,
        metrics: Metrics,
        *,
        mode: StagingMode,
        device: torch.device,
        rate_limit: RateLimit,
        check_finite: bool,
        layout: Mapping[str, str],
    ) -> None:
        """``layout`` is this rank's, see ``layout.py``."""
        self._layout = layout
        self._models = list(models)
        for model in models:
            model.on_audit = metrics.observe_audit
        self._shadows = shadows
        self.reader = Reader(groups, device, rate_limit, metrics)
        self._metrics = metrics
        self._mode = mode
        self._device = device
        self._rate_limit = rate_limit
        self._check_finite = check_finite
        # keeps its pinned memory: an allocation of it may wait for the device
        self._host_reader = HostReader()
        # scales by role at the last commit: noted before updates write in place, else None
        self._kv_scales: dict[str, dict[Place, Number]] | None = None

    def prepare(
        self,
        update: Update,
        selector: Selector | None,
        *,
        after: Any,
        proves_again: bool = False,
    ) -> Opened:
        """Make the models ready for an update, and mark each element of hollow weights.

        A staged update only reads the live weights. Only a commit writes them, on the scheduler's
        thread, and no commit can come while an update is open. ``after`` is the device's event
        behind the last commit and the forwards launched so far, or None: before that event nothing
        of the shadow is written or freed, and nothing is read that a forward has made.
        ``proves_again``: see ``Findings.prove``.
        """
        if after is not None:
            after.synchronize()
        models = self._select(self._models, selector)
        if not models:
            raise Refused(f"selector {selector!r} selects no model of this server")
        # checked again: serving may have made copies of weights since the start
        in_place = self._mode is StagingMode.OFF or update.in_place
        if (reason := why_not_updated(self._models, in_place=in_place)) is not None:
            raise Refused(reason)
        if update.asks_digests:
            self._refuse_digests_in_place(update)
        update.roles = {model.role for model in models}
        _refuse_partially_written(update, update.roles)
        for model in self._models:
            model.read_checkpoint(update.check)
        if in_place or update.fills_hollow:
            self.stop_proving()
        else:
            for model in self._models:
                model.findings.prove(
                    self._device,
                    update.check,
                    self._rate_limit,
                    self._layout,
                    again=proves_again,
                )
                model.findings.find_plan(self._device, update.check, self._rate_limit, self._layout)
        self._shadows.build(self._mode_of(update), self._device)
        for model in self._models:
            model.begin(is_partial=self._is_partial(update, model))
        if self._mode_of(update) is StagingMode.OFF and self._kv_scales is None:
            self._kv_scales = {model.role: kv_scales_of(model.runner.model) for model in models}
        if update.marks:
            for live in self._markable_weights(update):
                update.check()
                for (piece,) in self._rate_limit.cut(live.data):
                    mark(piece)
        if update.may_be_empty and self._mode is StagingMode.OFF:
            for model in self._models:
                if model.role in update.roles:
                    model.restore()
        if self._mode_of(update) is StagingMode.OFF:
            return Opened(in_place=True)
        self._shadows.form.begin()
        for model in models:
            model.expect(update.check)
        return Opened(in_place=False)

    def fill(
        self,
        update: Update,
        source: Source,
        selector: Selector | None,
        digests: AskedDigests | None = None,
    ) -> Staged:
        """Load one call's tensors into the shadow, through the model's own loader.

        Raise ``Altered`` with the tensors' names if they come with other ``digests`` than expected.
        """
        update.check()
        if isinstance(source, ServedSource):
            return self._fill_from_server(update, source)
        if digests is not None:
            self._refuse_digests_in_place(update)
        if update.saved_digest is not None:
            raise Refused(f"{SERVED_ELSEWHERE} came whole: nothing may come after them")
        started = time.perf_counter()
        staged = [model for model in self._models if model.role in update.roles]
        models = self._select(staged, selector)
        if not models:
            raise Refused(f"selector {selector!r} selects no model of this update")
        if is_sparse(source) and self._mode_of(update) is StagingMode.OFF:
            for model in models:
                model.find_plan_in_place(self._device, update.check, self._rate_limit, self._layout)
        tensors = nbytes = 0
        quantized: Counter[str] = Counter()
        arrivals = Arrivals(digests, self._host_reader, update.check, self._rate_limit)
        # close at once: the sender waits for the outcome
        with (
            arrivals.explaining(),
            closing(
                self.reader.read_for_each(
                    models,
                    update,
                    source,
                    arrivals,
                    partial(self._require_base, update),
                    partial(self.take_bulk, update),
                )
            ) as loads,
        ):
            for model, weights in loads:
                with closing(weights):
                    checks = model.load(
                        source,
                        self.take_in(update, weights),
                        takes_all=model is models[0],
                        check_finite=self._check_finite,
                        rate_limit=self._rate_limit,
                        check=update.check,
                    )
                update.names.setdefault(model.role, set()).update(checks.names)
                whole = set[str]() if is_sparse(source) else checks.names
                update.note_unpatched(model.role, checks.unpatched, whole)
                update.is_sparse |= is_sparse(source)
                if checks.tensors:
                    update.loaded.add(model.role)
                if model is models[0]:
                    tensors += checks.tensors
                    nbytes += checks.bytes
                    quantized += checks.quantized
                if isinstance(source, DiskSource):
                    update.checkpoints[model.role] = source
        update.add_digests(arrivals.digests)
        staged_s = time.perf_counter() - started
        self._metrics.observe_load(source, staged_s)
        self._metrics.staged_bytes.inc(nbytes)
        return Staged(
            staged_s=staged_s,
            tensors=tensors,
            bytes=nbytes,
            quantized=dict(quantized),
            warnings=tuple(update.warnings),
            unpatched=tuple(sorted(set[str]().union(*update.unpatched.values()))),
            received_digest=None if arrivals.digests is None else digest_of_all(arrivals.digests),
        )

    def _fill_from_server(self, update: Update, source: ServedSource) -> Staged:
        """Take in all weights of this rank as another server serves them."""
        if update.tensors or update.roles != self._all_roles:
            raise Refused(
                f"{SERVED_ELSEWHERE} come whole, for all models: they need an update of their own, "
                'or a session begun with selector "all" and without other tensors'
            )
        started = time.perf_counter()

        def count(tensor: torch.Tensor) -> None:
            update.tensors += 1
            update.bytes += tensor.nbytes

        load = next(iter(WHOLE_LOADERS), None)
        if load is None:
            raise Refused(f"{SERVED_ELSEWHERE}: the extension that reads them is off")
        loaded = load(
            source,
            self._models,
            self._weights(self._all_roles),
            self._layout,
            in_place=self._mode_of(update) is StagingMode.OFF,
            check_finite=self._check_finite,
            count=count,
            check=update.check,
            rate_limit=self._rate_limit,
        )
        update.saved_digest = loaded.digest
        update.loaded |= update.roles
        for model in self._models:
            # whatever its checkpoint brings
            update.names.setdefault(model.role, set()).update(model.names)
        update.add_digests(None)
        staged_s = time.perf_counter() - started
        self._metrics.observe_load(source, staged_s)
        self._metrics.staged_bytes.inc(loaded.bytes)
        return Staged(
            staged_s=staged_s, tensors=loaded.tensors, bytes=loaded.bytes, saved=loaded.saved
        )

    def take_in(self, update: Update, weights: Weights) -> Weights:
        """Count and hand on each tensor of an update, on its way to a model's loader."""
        for name, tensor in weights:
            update.check()
            if isinstance(tensor, torch.Tensor):
                update.bytes += tensor.nbytes
            update.tensors += 1
            yield name, tensor

    def take_bulk(
        self, update: Update, model: ShadowedModel, stretch: Stretch, row: torch.Tensor | None
    ) -> Sequence[int]:
        """Offer a stretch of an update to the load plan of ``model``: see ``Take``."""
        update.check()
        if (bulk := model.take(stretch, row)) is None:
            return range(len(stretch.names))
        update.tensors += len(bulk.names)
        update.bytes += bulk.nbytes
        return bulk.left

    def seal(self, update: Update, base_digest: str | None) -> Voted:
        """Check the update for completeness. Nothing after the seal can fail.

        ``base_digest`` is the live weights' digest, or None if unknown.
        """
        self.stop_reading()
        update.check()
        started = time.perf_counter()
        if not (update.tensors or update.may_be_empty or _may_change_nothing(update)):
            raise Refused("the update holds no tensor")
        # without a tensor, a client of SGLang's may have written the live weights
        was_loaded = update.tensors > 0 or not update.may_be_empty
        _refuse_fewer_tensors(update)
        # only a rollback needs this digest
        if base_digest is None and self._mode_of(update) is not StagingMode.OFF:
            update.base_digest = self._read_through(update, set(), set())
        shadowed = update.roles if was_loaded else set[str]()
        whole = {m.role for m in self._models if not self._is_partial(update, m)} & shadowed
        models = [model for model in self._models if model.role in update.roles]
        _refuse_unpatched(update)
        for model in models:
            model.refuse_if_unfinished()
        if update.fills_hollow:
            pass
        elif self._mode_of(update) is StagingMode.OFF:
            _refuse_partially_written(update, update.loaded)
            self._check_all_sent(update, whole)
            whole = set()
            for model in models:
                model.seal(was_loaded=was_loaded)
        elif was_loaded:
            for model in models:
                model.seal(was_loaded=True)
        digest = self._read_through(update, shadowed, whole)
        if update.saved_digest not in (None, digest):
            raise Refused(
                f"the weights staged as another server serves them have the digest {digest}, and "
                f"that server serves {update.saved_digest}"
            )
        kv_scale = self._changed_kv_scale(models)
        missing = self._count_unwritten(update) if update.fills_hollow else 0
        update.check()
        # requests were served since the update's begin
        is_staged = self._mode_of(update) is not StagingMode.OFF
        if is_staged and (reason := why_forwards_forbid(self._models)) is not None:
            raise Refused(reason)
        swap = self._prepare_swap(update) if was_loaded else PreparedSwap()
        checkpoints = self._checkpoints(update)
        staged_as = self._shadows.describe()
        names = {m.role: frozenset(update.names.get(m.role, ())) for m in models}
        update.sealed = Sealed(digest, swap, checkpoints, missing, staged_as, names)
        self._metrics.observe_changes(staged_as)
        return Voted(
            staged_s=time.perf_counter() - started,
            staged_as=staged_as,
            received_digest=update.received_digest,
            kv_scale=kv_scale,
        )

    def stop_proving(self) -> None:
        """End the searches that go on, before the served weights are written or released."""
        for model in self._models:
            model.findings.stop()

    def note_commit(self, *, rolls_back: bool) -> None:
        """Note that other weights are served. Called on the scheduler's thread, between updates."""
        self._kv_scales = None
        for model in self._models:
            model.note_commit(rolls_back=rolls_back)

    def drop(self) -> None:
        """Release the sender's memory, and what a dropped update has loaded."""
        self.stop_reading()
        for model in self._models:
            model.forget_loaded()

    @property
    def proof(self) -> Proof | None:
        """The proof of the model that is farthest from one. Read by the scheduler's thread."""
        found = [model.findings.proof for model in self._models if model.findings.proof is not None]
        return min(found, key=lambda p: ("failed", "due", "done").index(p.state), default=None)

    @property
    def ways(self) -> dict[str, Ways]:
        """How each model's tensors come into its weights, as far as that is known."""
        return {
            model.role: model.findings.ways
            for model in self._models
            if model.findings.ways is not None
        }

    def stop_reading(self) -> None:
        """Release the sender's memory; the update receives nothing more."""
        self.reader.stop_reading()

    @property
    def why_not_filled(self) -> str | None:
        """Why updates cannot fill weights without contents, element by element, or None."""
        role = next((model.role for model in self._models if model.findings.finishes), None)
        if role is None:
            return None
        return f"SGLang finishes the {role} model after loading, so sent elements are not counted"

    def has_written(self) -> bool:
        """Return whether the open update has written a model in place, while no job runs."""
        return any(model.was_written for model in self._models)

    def forget_shadows(self) -> None:
        """Free the shadows. Called on the scheduler's thread, while there is no job."""
        self._shadows.forget(self._device)

    def _refuse_digests_in_place(self, update: Update) -> None:
        """Raise ``Refused`` if tensors would be written over served ones, and compared later."""
        if self._mode_of(update) is StagingMode.OFF and not update.fills_hollow:
            raise Refused(
                "expected_digests, expected_digest and received_digest need staged weights: this "
                "update is written in place, and an altered tensor would be served before the last "
                "one has come. Leave them out"
            )

    def _mode_of(self, update: Update) -> StagingMode:
        is_in_place = update.fills_hollow or update.in_place
        return StagingMode.OFF if is_in_place else self._mode

    @property
    def _all_roles(self) -> set[str]:
        return {model.role for model in self._models}

    def _count_unwritten(self, update: Update) -> int:
        """Count the marked elements of hollow weights."""
        missing = 0
        for live in self._markable_weights(update):
            for (piece,) in self._rate_limit.cut(live.data):
                update.check()
                missing += count_marked(piece)
        return missing

    def _markable_weights(self, update: Update) -> Iterator[torch.Tensor]:
        """Yield the hollow weights able to bear marks, except those set by the model itself."""
        for model, weight in self._weights(self._all_roles - update.kept):
            if can_mark(weight.live) and weight.name not in model.set_by_the_model:
                yield weight.live

    def _prepare_swap(self, update: Update) -> PreparedSwap:
        if self._mode_of(update) is StagingMode.OFF:
            return PreparedSwap()
        models = [model for model in self._models if model.role in update.roles]
        weights = [weight for _, weight in self._weights(update.roles)]
        weights += [weight for model in models for weight in model.kind.derived]
        numbers = [number for model in models for number in model.kind.numbers]
        return self._shadows.form.prepare(weights, numbers)

    def _changed_kv_scale(self, models: Iterable[ShadowedModel]) -> str | None:
        """Return the first KV scale that the update changes, with its values; None if it keeps all.

        Raise ``Refused`` if it would change nothing, because the KV pool has its own copy.
        """
        for model in models:
            swaps = [swap for swap in model.kind.numbers if is_kv_scale(swap.place)]
            now: dict[Place, Number] = {swap.place: swap.other for swap in swaps}
            served: dict[Place, Number]
            if self._kv_scales is None:
                served = {swap.place: getattr(swap.owner, swap.attribute) for swap in swaps}
            else:
                served = self._kv_scales.get(model.role, {})
                now = kv_scales_of(model.runner.model) | now
            for place, scale in served.items():
                if scale == now.get(place):
                    continue
                change = describe_change(place, scale, now.get(place))
                if are_copied(model.runner):
                    raise Refused(
                        f"the update changes {change}, and the KV pool goes on with the scales of "
                        "the start: restart the server with the new checkpoint"
                    )
                return change
        return None

    def _checkpoints(self, update: Update) -> tuple[tuple[ModelRunner, DiskSource], ...]:
        return tuple(
            (model.runner, update.checkpoints[model.role])
            for model in self._models
            if model.role in update.checkpoints
        )

    def _require_base(self, update: Update, digests: tuple[str, ...]) -> None:
        """Raise ``Conflict`` unless the served weights have one of ``digests``.

        The digests are the first rank's, and a replica's first rank compares them for the others.
        """
        parallel = get_parallel()
        if parallel.pp_rank or parallel.tp_rank:
            return
        if update.live_digest is None:
            update.live_digest = self._read_through(update, set(), set())
        if update.live_digest not in digests:
            raise Conflict(
                f"base_digests are {list_names([*digests])}, and the weights that are served as "
                f"{update.base_version!r} have the digest {update.live_digest}"
            )

    def _read_through(self, update: Update, shadowed: set[str], whole: set[str]) -> str:
        """Return the digest of all models of this rank, with the shadows of ``shadowed`` roles.

        Raise ``Refused`` if a weight of a ``whole`` role was not written whole.
        """
        if self._mode_of(update) is StagingMode.OFF and not whole:
            # requests wait for this digest
            served = [
                (f"{model.role}.{weight.name}", weight.live)
                for model, weight in self._weights(self._all_roles)
            ]
            return digest_of(served, update.check)
        digest = Digest()
        came_all = {r for r in whole if self._has_checkpoint(r) and not self._unsent(update, {r})}
        for model, weight in self._weights(self._all_roles):
            name = f"{model.role}.{weight.name}"
            if model.role in whole:
                missing = model.missing(weight, came_all=model.role in came_all)
                if missing:
                    raise self._incomplete(update, whole, weight, missing)
            if model.role in shadowed and self._mode_of(update) is not StagingMode.OFF:
                line = self._shadows.form.line_of(name, weight, update.check)
            else:
                one = TensorDigest(name, weight.live)
                line = read_paced(one, self._host_reader, self._rate_limit, update.check)
            digest.add(line)
        for model in self._models:
            digest.add(model.kind.describe_numbers(as_staged=model.role in shadowed))
        return digest.hexdigest()

    def _incomplete(
        self, update: Update, whole: set[str], weight: Weight, elements: int
    ) -> Refused:
        unsent = self._unsent(update, whole)
        return Refused(
            f"the update is not complete: {elements} of {weight.live.numel()} elements of "
            f"{weight.name!r} were not sent"
            + (f"; not sent: {list_names(unsent)}" if unsent else "")
            + ". Send them, or set partial=true"
        )

    def _check_all_sent(self, update: Update, whole: set[str]) -> None:
        """Raise ``Refused`` for missing names: weights written in place bear no marks to count."""
        if unsent := self._unsent(update, whole):
            raise Refused(
                f"the update is not complete: {list_names(unsent)} were not sent. The weights are "
                "partially written: send all of them"
            )

    def _unsent(self, update: Update, whole: set[str]) -> list[str]:
        return sorted(
            {
                name
                for model in self._models
                if model.role in whole
                for name in model.names - update.names.get(model.role, set())
            }
        )

    def _weights(self, roles: Iterable[str]) -> Iterator[tuple[ShadowedModel, Weight]]:
        """Yield each weight of ``roles`` with its model, once.

        A weight shared by a draft and its target is the target's.
        """
        wanted, seen = set(roles), set[int]()
        for model in self._models:
            for weight in model.kind.weights:
                is_first = id(weight.live) not in seen
                seen.add(id(weight.live))
                if is_first and model.role in wanted:
                    yield model, weight

    def _has_checkpoint(self, role: str) -> bool:
        return any(model.role == role and model.names for model in self._models)

    def _is_partial(self, update: Update, model: ShadowedModel) -> bool:
        # a draft loads its part of the target's tensors and keeps its other weights
        return update.partial or model.role != "target"

    def _select(
        self, models: list[ShadowedModel], selector: Selector | None
    ) -> list[ShadowedModel]:
        """Return the ``models`` addressed by a call.

        Without a selector these are the first model (the target, if present) and all models loaded
        from the same checkpoint. A draft with its own checkpoint (EAGLE, STANDALONE) may use the
        same names for other tensors.
        """
        if selector is None:
            return [
                model
                for model in models
                if model.findings.checkpoint == models[0].findings.checkpoint
            ]
        return [m for m in models if selector == "all" or m.role.split("_")[0] == selector]


def _refuse_partially_written(update: Update, brought: set[str]) -> None:
    """Raise ``Refused`` if a partially written model got no tensor: a commit calls it whole."""
    if torn := update.mends - brought:
        raise Refused(
            f"the weights of the {' and '.join(sorted(torn))} model are partially written, and the "
            "update has none of them: send the whole version (partial=false)"
        )


def _refuse_unpatched(update: Update) -> None:
    """Raise ``Refused`` if parts of a tensor came that goes whole alone, and not all of it."""
    for role, names in update.unpatched.items():
        if names:
            raise Refused(
                f"load_format 'sparse': what the {role} model's loader computes with, what SGLang "
                "finishes after loading, and what is in no load plan is taken whole alone: send "
                f"whole tensors {list_names(sorted(names))}"
            )


def _may_change_nothing(update: Update) -> bool:
    """Return whether an update without a tensor is a version like the one before it."""
    return update.partial and update.needs is None and not update.fills_hollow


def _refuse_fewer_tensors(update: Update) -> None:
    """Raise ``Refused`` if a tensor that the update needs was not sent, or only a part of one."""
    if update.is_sparse and (update.needs is not None or not update.partial):
        raise Refused(
            "the update is not complete: load_format 'sparse' brings parts of tensors, and whole "
            "ones are needed. Send whole tensors, or set partial=true"
        )
    for role, names in (update.needs or {}).items():
        missing = names - update.names.get(role, set())
        if role in update.roles and missing:
            raise Refused(
                f"the update is not complete: {len(missing)} of the {len(names)} tensors that the "
                f"last session brought for the {role} model were not sent: "
                f"{list_names(sorted(missing))}. Send them, or set partial=true"
            )
