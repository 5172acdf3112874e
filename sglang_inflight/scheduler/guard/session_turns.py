"""Turns of a streaming session that are retracted or refused, and the session's other turns.

A session has one turn at a time, and continues from its last finished one. SGLang takes a
retracted turn for a finished one, and a refused one for the one that runs: the next turn is let in
beside it, and the scheduler ends when both want the session's KV. Only the scheduler's thread
touches a session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.pools import SessionSlot, StreamingSession
    from sglang_inflight.scheduler.sglang_types.req import Req, Session


def hand_back(sessions: StreamingSession, slot: SessionSlot, req: Req) -> None:
    """Give a retracted turn the KV that its session lent it, so that the retraction frees it.

    The session stays in flight, and the turn recomputes the history when it runs again. Nothing
    of an unfinished turn is left in the session: whatever ends the turn meanwhile, the next turn
    continues from the last finished one.
    """
    assert req.session is not None
    del sessions.slots[req.session.session_id]
    req.lock, slot.lock = slot.lock, None


def detach_refused(req: Req, session: Session, *args: object, **kwargs: object) -> None:
    """A turn that its session refused does not end the turn that is in flight, nor take its KV.

    ``create_req`` lets a turn in, or refuses it by ``to_finish``.
    """
    if session.streaming and req.to_finish is not None:
        req.session = None


def end_turns_given_up(retracted: tuple[list[Req], float, list[Req]], *args: object) -> None:
    """Turns that no memory is left for end with their retraction, and their sessions go on."""
    _, _, given_up = retracted
    for req in given_up:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()
