"""One model of a rank, the target or a draft, with its shadow."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.utils import dynamic_import

from sglang_inflight.errors import Refused
from sglang_inflight.messages import DIRECT, FLATTENED_BUCKET, DiskSource, Source, TensorSource
from sglang_inflight.scheduler.update.checks.derived import why_not_loaded, why_not_shadowed
from sglang_inflight.scheduler.update.checks.tensors import TensorChecks
from sglang_inflight.scheduler.update.finished_model import FinishedModel
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.shadow import Shadow, ShadowParameters, unwatched
from sglang_inflight.scheduler.update.sources.aside import Aside
from sglang_inflight.scheduler.update.sources.checkpoint import Shapes, read_shapes
from sglang_inflight.scheduler.update.throttle.copies import rate_limited
from sglang_inflight.scheduler.update.throttle.rate import RateLimit

if TYPE_CHECKING:
    from sglang_inflight.scheduler.upstream.model_runner import ModelRunner

Weights = Iterator[tuple[str, torch.Tensor]]


class ShadowedModel:
    """Loads tensors into the shadow of one model. Used on the staging thread.

    One that cannot be shadowed has none, and is loaded in place (``FinishedModel``).
    """

    def __init__(self, role: str, runner: ModelRunner, parameters: ShadowParameters) -> None:
        self.role = role
        self.runner = runner
        # the one it was started with
        self.checkpoint = runner.model_config.model_path
        self._parameters = parameters
        # called before each write of a parameter
        self.on_write: Callable[[], None] = _tell_nobody
        self._shadow: Shadow | FinishedModel | None = None
        self._served: Shapes | None = None

    def build_shadow(self, mode: StagingMode, device: torch.device) -> None:
        """At the first update, so that a server that has none pays nothing."""
        if self._shadow is not None:
            return
        if why_not_shadowed(self.runner.model) is not None:
            assert mode is StagingMode.OFF
            self._parameters.keep_for(self.runner.model)
            self._shadow = FinishedModel(self.runner.model, device)
            return
        storage = torch.device("cpu") if mode is StagingMode.HOST else device
        self._shadow = Shadow(
            self.runner.model,
            self._parameters,
            storage=None if mode is StagingMode.OFF else storage,
        )

    @property
    def shadow(self) -> Shadow | FinishedModel:
        assert self._shadow is not None
        return self._shadow

    def forget_shadow(self) -> None:
        """The next update builds it anew. Its memory is the ``ShadowParameters``' to give back."""
        self._shadow = None

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.runner.model.parameters())

    def finish(self, *, was_loaded: bool = True) -> None:
        """Nothing more is loaded. ``was_loaded`` is false where something else wrote it."""
        # one that no tensor came for is finished, and would be finished twice
        if isinstance(self.shadow, FinishedModel) and self.shadow.is_open:
            self.on_write()
            self.shadow.finish(was_loaded=was_loaded)

    def restore(self) -> None:
        """It is about to be written, by a load or by something else."""
        if isinstance(self.shadow, FinishedModel):
            self.on_write()
            self.shadow.restore()

    def refuse_if_derived(self) -> None:
        """Raises ``Refused`` where a loader wrote something that no commit takes over."""
        if (name := self.shadow.find_derived()) is not None:
            raise Refused(
                f"weights of the {self.role} model cannot be staged: loading them changes "
                f"{name!r} too, which is no weight, and a commit would leave it as it was"
            )

    def read_served(self, check: Callable[[], None]) -> None:
        """Read ``served``, unless that is done; ``check`` raises when it is time to give up."""
        if self._served is None:
            with Aside(check) as aside:
                self._served = aside.do(self._read_shapes)

    @property
    def served(self) -> Shapes:
        """Shapes in the checkpoint the server was started with; none if it is not here."""
        assert self._served is not None
        return self._served

    def _read_shapes(self) -> Shapes:
        return read_shapes(
            self.checkpoint,
            revision=self.runner.model_config.revision,
            cache=self.runner.load_config.download_dir,
        )

    @property
    def _ties_head(self) -> bool:
        config = self.runner.model_config
        return any(
            getattr(part, "tie_word_embeddings", False)
            for part in (config.hf_config, config.hf_text_config)
        )

    def load(
        self,
        source: Source,
        weights: Weights,
        *,
        takes_all: bool,
        check_finite: bool,
        rate_limit: RateLimit,
    ) -> TensorChecks:
        """Load ``weights`` through the model's own loader; returns what was counted.

        ``takes_all`` is false where some of them may be another model's.

        Torch's default dtype stays what it is, though SGLang loads from disk under the
        model's: it is the whole process's, and the loop makes a request's biases in it, and
        compiles for it, meanwhile. SGLang loads tensors and broadcasts without it, too.
        """
        load_format = source.load_format if isinstance(source, TensorSource) else None
        is_checkpoint = load_format in (None, FLATTENED_BUCKET)
        checks = TensorChecks(
            served=self.served if is_checkpoint else {},
            # of a live model nobody tells what its loader writes
            expects_writes=takes_all
            and isinstance(self.shadow, Shadow)
            and (is_checkpoint or load_format == DIRECT),
            ties_head=self._ties_head,
            check_finite=check_finite,
            rate_limit=rate_limit,
        )
        watched = checks.watch(weights)
        self._parameters.writing = functools.partial(self._writing, checks, rate_limit)
        try:
            self._load(source, load_format, _one_at_a_time(self._restored_for(watched)))
            # a loader may stop before the end: what it did not take is not loaded
            for _ in watched:
                pass
        except Refused:
            # from itself it would be a cycle, which keeps the tensors of its frames
            raise
        except Exception as error:
            if not checks.holds_a_tensor:
                raise
            raise checks.explain(error) from error
        finally:
            self._parameters.writing = unwatched
        return checks

    def _restored_for(self, weights: Weights) -> Weights:
        """Before a loader looks up parameters, which this may replace, but not before there is a
        tensor: what fails until then has changed nothing.
        """
        first = list(itertools.islice(weights, 1))
        if first:
            self.restore()
        return itertools.chain(first, weights)

    def _load(self, source: Source, load_format: str | None, weights: Weights) -> Any:
        model: Any = self.shadow.model
        if isinstance(source, DiskSource) and isinstance(self.shadow, FinishedModel):
            return self.shadow.load(weights)
        if load_format in (None, FLATTENED_BUCKET):
            return model.load_weights(weights)
        if load_format == DIRECT:
            return self._load_direct(weights)
        if load_format in self.runner.weight_updater.custom_weight_loaders:
            return dynamic_import(load_format)(model, weights)
        raise Refused(f"load_format {load_format!r} is not known for tensors")

    def _load_direct(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Names are the parameters' own, shapes are those of this rank's shard."""
        parameters = dict(self.shadow.model.named_parameters())
        for name, tensor in weights:
            with self._parameters.writing(name, parameters[name], tensor) as may_write:
                if may_write:
                    default_weight_loader(parameters[name], tensor)

    @contextmanager
    def _writing(
        self,
        checks: TensorChecks,
        rate_limit: RateLimit,
        name: str,
        shadow: torch.Tensor,
        loaded: torch.Tensor,
    ) -> Iterator[bool]:
        checks.count_write(name)
        if self.shadow.is_anothers(shadow):
            # a draft's checkpoint may have its own of what it has from its target once it serves
            yield False
            return
        self.on_write()
        with rate_limited(rate_limit, shadow, loaded):
            yield True


def why_not_updated(models: Iterable[ShadowedModel], *, in_place: bool) -> str | None:
    """Why ``models`` cannot be updated as they are now, or None where they can."""
    why_not, what = (why_not_loaded, "updated") if in_place else (why_not_shadowed, "staged")
    for model in models:
        if (reason := why_not(model.runner.model)) is not None:
            return f"weights of the {model.role} model cannot be {what}: {reason}"
    return None


def _tell_nobody() -> None:
    pass


def _one_at_a_time(weights: Weights) -> Weights:
    """Loaders with threads of their own are to use none.

    A copy that a thread makes could come after the vote, on a stream that nothing waits for,
    and out of memory that is the next tensor's by then. Upstream's loaders look for this mark.
    """
    for name, tensor in weights:
        tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
        yield name, tensor
