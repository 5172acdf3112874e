"""Requests pinned to one version of the weights.

A request names the served or the previous version: ``weight_version`` in
``sampling_params.custom_params``. Exactly these weights make each of its tokens, and its KV. The
name is looked up once, as the request arrives. A later rename, or another commit of the same name,
does not change the request's weights.

The previous version is lost when the next update opens, when memory is released, and after a commit
that was written in place. A request that waits for lost weights ends with 503. One that has tokens
ends with these. A name that neither version has is a 409.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.versions.token_versions import Versions, pinned_label
from sglang_inflight.vocabulary.contracts import WEIGHT_VERSION, custom_param
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# no weights have this number
_NONE = -1


class Pin(NamedTuple):
    """The weights that make every token of a request."""

    # the number ``LiveWeights.weights``
    weights: int
    # their label as the request arrived
    label: VersionLabel


class Unreachable(NamedTuple):
    """Why a request cannot have the version that it names."""

    why: str
    status: HTTPStatus


@dataclass(slots=True)
class _Named:
    """A request's record: the weights of every token, or why they cannot be had."""

    pin: Pin | Unreachable | None = None


class Pins:
    """Looks up the weights of pinned requests. Only the scheduler's thread touches this object."""

    def __init__(self, live: LiveWeights, versions: Versions) -> None:
        self._live = live
        self._versions = versions

    def admit(self, req: Req) -> bool:
        """Look up the version that ``req`` names, if it names one; return whether it does.

        A request comes here again after a retraction, and keeps its weights.
        """
        name = custom_param(req.sampling_params, WEIGHT_VERSION)
        if name is None:
            return False
        named = record_of(req).part(_Named)
        if named.pin is None:
            named.pin = self._look_up(name)
            record_of(req).weights = named.pin.weights if isinstance(named.pin, Pin) else _NONE
        if isinstance(named.pin, Pin) and pinned_label(req.weight_version_events) is None:
            self._versions.pin(req, named.pin.label)
        return True

    def is_of_previous(self, req: Req) -> bool:
        """Return whether ``req`` needs the previous version now."""
        previous = self._live.reachable
        return previous is not None and record_of(req).weights == previous.weights

    def why_not(self, req: Req) -> FINISH_ABORT | None:
        """Return why ``req`` must end, or None if its weights are there."""
        weights = record_of(req).weights
        if weights in (None, self._live.weights) or self.is_of_previous(req):
            return None
        pin = record_of(req).part(_Named).pin
        assert pin is not None
        if isinstance(pin, Unreachable):
            return FINISH_ABORT(pin.why, pin.status)
        why = (
            f"The server lost the weights {pin.label.version!r} (epoch {pin.label.epoch}), which "
            f"the request names in {WEIGHT_VERSION}: {self._say_served()}"
        )
        # a status would take its tokens from the request
        return FINISH_ABORT(why, None if req.output_ids else HTTPStatus.SERVICE_UNAVAILABLE)

    def _look_up(self, name: str) -> Pin | Unreachable:
        live, previous = self._live, self._live.reachable
        if live.is_named and name == self._versions.current:
            return Pin(live.weights, self._versions.label)
        if previous is not None and name == previous.version:
            return Pin(previous.weights, previous.label)
        return Unreachable(
            f"{WEIGHT_VERSION} is {name!r}: {self._say_served()}", HTTPStatus.CONFLICT
        )

    def _say_served(self) -> str:
        previous = self._live.reachable
        before = "no previous version" if previous is None else f"{previous.version!r} before it"
        return f"it has {self._versions.current!r}, and {before}"
