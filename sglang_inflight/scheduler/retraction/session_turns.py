"""Keeps one turn at a time in a streaming session, also when a turn is retracted or refused.

A session runs one turn at a time, from the KV of its last finished turn. SGLang takes a retracted
turn for a finished one, and a refused turn for the running one. A second turn is then admitted, and
the scheduler ends when both use the session's KV. Only the scheduler's thread touches a session.

This module hooks ``Session``, ``StreamingSession`` and ``ScheduleBatch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_inflight.hooking import AFTER, AROUND, hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import SessionSlot, StreamingSession


def move_kv_to_turn(sessions: StreamingSession, slot: SessionSlot, req: Req) -> None:
    """Move the session's KV to the retracted turn, so that the retraction frees it.

    The session stays in flight, and the turn recomputes the history when it runs again. The
    session keeps nothing of an unfinished turn. If the turn is aborted meanwhile, the next turn
    continues from the last finished one.
    """
    assert req.session is not None
    del sessions.slots[req.session.session_id]
    req.lock, slot.lock = slot.lock, None


@hook("sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req", AROUND)
def end_turn(keep: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """Leave a finished request's row to its streaming session; free a retracted one's."""
    slot = sessions.borrowed_slot(req)
    if slot is None or req.finished():
        return keep(sessions, req)
    move_kv_to_turn(sessions, slot, req)
    return False


@hook("sglang.srt.session.session_controller.Session.create_req", AFTER)
def detach_refused(req: Req, session: Session, *args: object, **kwargs: object) -> None:
    """Detach a refused turn from its session, so that it neither ends nor frees the running turn.

    ``create_req`` marks a refused turn by ``to_finish``.
    """
    if session.streaming and req.to_finish is not None:
        req.session = None


@hook("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", AFTER)
def end_turns_of_aborted(retracted: tuple[list[Req], float, list[Req]], *args: object) -> None:
    """End the session's turn for requests aborted for lack of memory, so that the next may run."""
    _, _, given_up = retracted
    for req in given_up:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()
