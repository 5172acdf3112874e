"""Leads a request through its script: which cached prefix it finds, its chunks, and its pauses.

A pause is the pause machine's ``in_place``, with a lease, so that a client that dies leaves the
server serving. It is taken at the boundary behind the launch of the forward that computes the
position. That is where the recorded commit was made. The pause reads the results in flight, and no
forward is launched between it and the repeated commit.

The ranks of a replica have equal requests and equal trails, so all of them pause at the same
boundary. Only the scheduler's thread runs this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_inflight.extensions.replay import PAUSE_ID, SCRIPT
from sglang_inflight.extensions.replay.script import Script, read_script
from sglang_inflight.extensions.trails.trails import Trail, trail_of
from sglang_inflight.hooking import AFTER, AROUND, REQ, hook
from sglang_inflight.messages import PauseCall
from sglang_inflight.scheduler.controller import BOUNDARIES, ENTRIES, PARTS, Controller
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
# longer than a checkpoint takes to come
LEASE_S = 900.0


@dataclass(slots=True)
class _OfRequest:
    script: Script | None = None


class Follow:
    """The scripts of one scheduler's requests."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        # requests with a script, and some that have ended
        self._reqs: weakref.WeakSet[Req] = weakref.WeakSet()

    def admit(self, req: Req) -> None:
        script = custom_param(req.sampling_params, SCRIPT)
        if script is not None and req not in self._reqs:
            record_of(req).part(_OfRequest).script = read_script(script)
            self._reqs.add(req)

    def settle(self) -> None:
        """Pause if a request has come to its next pause. Called between steps."""
        for req in list(self._reqs):
            script = script_of(req)
            if script is None or not script.pauses or req.finished():
                continue
            trail = trail_of(req)
            if (trail.retractions, trail.computed) >= script.pauses[0]:
                del script.pauses[0]
                self._pause.ask(PauseCall(mode="in_place", pause_id=PAUSE_ID, lease_s=LEASE_S))


def script_of(req: Req) -> Script | None:
    return record_of(req).part(_OfRequest).script


def next_prefill(script: Script, trail: Trail) -> tuple[int, int] | None:
    """Return the positions that the request's next prefill must compute, if its script says so."""
    done = sum(kind == "prefill" for kind, *_ in trail.events)
    return script.prefills[done] if done < len(script.prefills) else None


@hook(f"{REQ}._compute_max_prefix_len", AFTER)
def limit_prefix(length: int, req: Req, *args: Any) -> int:
    """Let a request find no more of its prefix than its script says."""
    script = script_of(req)
    prefill = None if script is None else next_prefill(script, trail_of(req))
    return length if prefill is None else min(length, prefill[0])


@hook(f"{_ADDER}.add_one_req", AROUND, order=1)
@hook(f"{_ADDER}.add_chunked_req", AROUND, order=1)
def limit_chunk(
    add: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """End a request's chunk where its script says."""
    script, before = script_of(req), adder.rem_chunk_tokens
    prefill = None if script is None else next_prefill(script, trail_of(req))
    if prefill is None or before is None:
        return add(adder, req, *args, **kwargs)
    begin, end = prefill
    limit = adder.rem_chunk_tokens = min(before, end - begin)
    try:
        return add(adder, req, *args, **kwargs)
    finally:
        adder.rem_chunk_tokens = before - (limit - adder.rem_chunk_tokens)


@PARTS.join(order=2)
def make_follow(controller: Controller) -> Follow:
    return Follow(controller.pause)


@ENTRIES.join(order=5)
def admit(controller: Controller, req: Req) -> None:
    controller.part(Follow).admit(req)


@BOUNDARIES.join(order=1)
def settle(controller: Controller) -> Callable[[], None]:
    return controller.part(Follow).settle
