"""Separates cached prefixes by the weights that made them.

SGLang's radix cache looks a prefix up under a request's ``extra_key``. The fence adds the weights'
epoch to this key. After a fencing commit a request that starts its prefill uses the new epoch,
finds no older prefix, and fills its own. So does a request with a ``cache_salt``, even if its salt
names the weights: a salt separates callers' prefixes within a key. Running requests keep their key
and their KV, but their KV is not put into the cache any more. Nothing is flushed and no tree is
walked. Old entries are never looked up again and get no children, so they are the least recently
used and evicted first.

A request of certain weights alone has their number in the key instead. So its prefixes are
of exactly these weights, also after commits that keep older prefixes, and no fence applies to it.

A streaming session looks nothing up: it lends the KV of its last request to the next. At a fence it
frees this KV, at once or when the request running on it ends.

A caller's own ``extra_key`` is a part of the key. Text of our marks in it is rewritten, so no
caller's prefixes come under a key of ours.

The key of SGLang's cache of multimodal embeddings is the content alone, so embeddings of older
weights would serve newer weights. That cache is cleared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers import mm_schedule

from sglang_inflight.hooking import AROUND, hook
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.requests import record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.streaming_session import StreamingSession

_MARK = "|inflight-epoch:"
_OF_WEIGHTS = "|inflight-weights:"
# a caller's text that reads like a mark. The substitute has no bar, so it makes up no other mark
_FORGED = re.compile(r"\|(?=inflight-(?:epoch|weights):)")
_SUBSTITUTE = "/"


class PrefixFence:
    """The epoch of cached prefixes. Only the scheduler's thread touches this object."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._epoch = 0

    def raise_to(self, epoch: int) -> None:
        """Keep later prefills from reusing a prefix from before ``epoch``."""
        self._epoch = epoch
        for req in self._boundary.requests.running():
            if record_of(req).weights is None:
                self.keep_out_of_cache(req)
        for req in self._boundary.free_sessions():
            self.keep_out_of_cache(req)
        forget_embeddings()
        for req in self._boundary.requests.without_kv():
            self.admit(req)

    def receive(self, req: Req, *, is_of_others: bool) -> None:
        """Keep KV of a prefill server out of the cache if other weights made it.

        The key of ``req`` has this server's epoch at the request's arrival, and does not show the
        prefill server's weights.
        """
        if is_of_others and self._epoch:
            self.keep_out_of_cache(req)

    def keep_out_of_cache(self, req: Req) -> None:
        """Keep the KV of ``req`` out of the cache."""
        record = record_of(req)
        if not record.is_fenced_off:
            record.is_fenced_off, record.was_kept_out = True, req.skip_radix_cache_insert
            req.skip_radix_cache_insert = True

    def admit(self, req: Req) -> None:
        """Set the key of a request, new or retracted, at its entry into the waiting queue."""
        if req.kv.retraction_backup is not None:
            # retracted with a backup of its KV: the KV is cached under the old key, if at all
            return
        record = record_of(req)
        if record.is_fenced_off:
            # retracted: no KV of the old weights is left
            req.skip_radix_cache_insert = record.was_kept_out
            record.is_fenced_off = False
        if not record.has_own_key and req.extra_key:
            req.extra_key = _FORGED.sub(_SUBSTITUTE, req.extra_key)
        record.has_own_key = True
        if record.weights is not None:
            req.extra_key = f"{_own_key(req)}{_OF_WEIGHTS}{record.weights}"
        elif self._epoch:
            req.extra_key = f"{_own_key(req)}{_MARK}{self._epoch}"


@hook(
    "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req", AROUND, order=1
)
def free_turn(keep: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """Free a session's KV at a turn's end if it is fenced off; the next turn recomputes it."""
    session = req.session if sessions.borrowed_slot(req) is not None else None
    is_kept = keep(sessions, req)
    if is_kept and session is not None and req.finished() and record_of(req).is_fenced_off:
        sessions.cache.release_session(session.session_id)
    return is_kept


def _own_key(req: Req) -> str:
    """Return the key without our mark, its end: no caller's text is left that reads like one."""
    return (req.extra_key or "").partition(_MARK)[0].partition(_OF_WEIGHTS)[0]


def forget_embeddings() -> None:
    """Clear the cache, on the scheduler's thread between two steps. This thread owns the cache.

    A half-done prefill encodes its images again for the next chunk.
    """
    # None if the model takes text alone
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
