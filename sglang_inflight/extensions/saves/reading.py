"""One rank's served weights, read on another thread beside everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from sglang_inflight.extensions.saves.copying import PieceCopier, require_version
from sglang_inflight.extensions.saves.tensors import LiveNumbers, live_tensors, read_numbers
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.worker import StagingWorker
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types import get_model
from sglang_inflight.vocabulary.errors import Conflict, Refused


class ServedWeights:
    """The weights that this rank serves. One thread reads them; the scheduler's asks and stops.

    ``_lock`` is held while the weights are read: ``await_no_reader`` returns when nobody does.
    """

    def __init__(
        self,
        models: Sequence[ShadowedModel],
        live: LiveWeights,
        device: torch.device,
        *,
        why_not: str | None,
        loads_are_known: bool,
        rate_limit: RateLimit,
    ) -> None:
        """``why_not``: why no weights can be read, or None.

        ``loads_are_known``: updates bring all weights before the first request.
        """
        self.live = live
        self._models = list(models)
        self._device = device
        self._why_not = why_not
        self._loads_are_known = loads_are_known
        self._rate_limit = rate_limit
        self._lock = threading.Lock()
        self._copier: PieceCopier | None = None
        self._is_derivable = False

    # ---- on the scheduler's thread ---------------------------------------------------

    def require(self, expected_version: str | None, *, current_version: str) -> None:
        """Raise unless the served weights may be read, and are of ``expected_version``."""
        if self._why_not is not None:
            raise Refused(self._why_not)
        if expected_version not in (None, current_version):
            raise Conflict(
                f"expected_version is {expected_version!r}, but {current_version!r} is serving"
            )
        if not self.live.is_named:
            raise Conflict("the weights cannot be saved: something else than an update wrote them")
        require_version(self.live, self.live.weights)

    def await_no_reader(self) -> None:
        """Return when nobody reads the weights. The readers' ``check`` must raise by then."""
        with self._lock:
            pass

    # ---- on the reading thread -------------------------------------------------------

    def tensors(self, check: Callable[[], None]) -> list[tuple[str, torch.Tensor]]:
        """Return each tensor by its name, in the digest's order. ``check`` raises to give up."""
        if not self._is_derivable:
            for model in self._models:
                model.refuse_underivable(check, loads_are_known=self._loads_are_known)
            self._is_derivable = True
        return live_tensors(self._models)

    def pieces_of(
        self, tensor: torch.Tensor, weights: int, check: Callable[[], None]
    ) -> Iterator[torch.Tensor]:
        """Yield the pieces of ``tensor`` in the version of number ``weights``: see ``copying``."""
        return self._pieces.pieces_of(tensor, weights, check, self._rate_limit)

    def numbers(self, weights: int, check: Callable[[], None]) -> LiveNumbers:
        """Return the numbers of the version of number ``weights``."""
        numbers: list[LiveNumbers] = []
        self._pieces.read(lambda: numbers.append(read_numbers(self._models)), weights, check)
        return numbers[-1]

    @property
    def _pieces(self) -> PieceCopier:
        if self._copier is None:
            # kept: an allocation of pinned memory may wait for the device
            self._copier = PieceCopier(self.live, self._lock, self._device)
        return self._copier


def readable_by_a_thread(
    controller: Controller, name: str
) -> tuple[ServedWeights, Callable[[], StagingWorker]]:
    """Return the served weights, and what starts the thread ``name`` to read them."""
    parts = controller.staging_parts
    # requests run meanwhile in every mode
    rate_limit = parts.rate_limit.for_another_thread()
    served = ServedWeights(
        parts.models,
        controller.live,
        parts.device,
        why_not=why_not_saved(controller.staging.can.stage),
        loads_are_known=Settings.from_environment().require_update,
        rate_limit=rate_limit,
    )
    return served, lambda: parts.make_thread(name, rate_limit)


def why_not_saved(can_stage: str | None) -> str | None:
    """Return why the served weights of this server cannot be saved, or None if they can."""
    if can_stage is not None:
        return f"the weights cannot be saved: {can_stage}"
    if get_model().remote_instance_weight_loader_start_seed_via_transfer_engine:
        return (
            "the weights cannot be saved: trainers may write them at any time "
            "(--remote-instance-weight-loader-start-seed-via-transfer-engine)"
        )
    return None
