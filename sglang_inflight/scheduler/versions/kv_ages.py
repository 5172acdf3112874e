"""Bounds the age of KV: who may go on with it, and who may find it in the prefix cache.

The age of KV is the number of commits and rollbacks since the oldest forward that made a part of
it. A commit brings a policy (``vocabulary/kept_kv.py``). A request may have a bound of its own in
its ``custom_params``, which replaces the policy's.

**Prefixes.** SGLang's radix cache looks a prefix up under a request's ``extra_key``. The key has a
mark with a generation: an epoch that began with a bounded commit. All KV under a mark is of that
epoch or of a later one. So a request may use each generation that is not older than its bound. The
lookup takes the generation with the longest match, and the request computes and caches the rest
under the same mark. A request that finds nothing begins under the newest mark. Nothing is flushed
and no tree is walked. Generations that no request may use are never looked up again and get no
children, so they are the least recently used and evicted first. A lookup tries ``MOST_LOOKUPS``
generations, the newest ones. It reuses less than it could then, and never older KV.

A salt (``cache_salt``) separates callers' prefixes within a key, and does not tell their age. A
policy has a bound of its own for salted requests (``by_salt``).

**Running requests.** A request's ``kv_epoch`` is a lower bound of the epochs that made its KV: the
generation of the prefix that it found, or else the epoch of its first forward. So the host knows
each request's age, and reads no slot. Requests over their bound are retracted, and recompute their
KV. ``extensions/refresh`` does so a little at each step. A recomputed request looks for KV of the
served weights alone: with older KV it would soon be over its bound again.

A model with a state (Mamba) has no age by token. Its state has the request's age, because a
retraction recomputes the state from its start.

A request of certain weights alone has their number in the key instead. So its prefixes are
of exactly these weights, also after commits that keep older prefixes, and no bound applies to it.

A streaming session looks nothing up: it lends the KV of its last request to the next. A commit
frees this KV if it is too old, at once or when the request running on it ends.

A caller's own ``extra_key`` is a part of the key. Text of our marks in it is rewritten, so no
caller's prefixes come under a key of ours.

The key of SGLang's cache of multimodal embeddings is the content alone, so embeddings of older
weights would serve newer weights. That cache is cleared before its oldest entry is over the bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import mm_schedule
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import _req_radix_key

from sglang_inflight.hooking import AROUND, REQ, hook
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.sglang_types import get_disagg
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.kept_kv import KV_MAX_AGE, KeptKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.streaming_session import StreamingSession

_MARK = "|inflight-epoch:"
_OF_WEIGHTS = "|inflight-weights:"
# a caller's text that reads like a mark. The substitute has no bar, so it makes up no other mark
_FORGED = re.compile(r"\|(?=inflight-(?:epoch|weights):)")
_SUBSTITUTE = "/"
# each lookup walks the tree along the whole prompt
MOST_LOOKUPS = 16


@dataclass
class _Floor:
    """The last policy's rule for prefixes: the oldest usable epoch, and whether it is a bound."""

    epoch: int = 0
    is_bounded: bool = False


class KVAges:
    """Ages of one scheduler's KV. Only the scheduler's thread touches this object.

    Ranks of a replica have equal requests and equal trees, so they take the same decisions.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._epoch = 0
        # epochs that marks name, ascending; the first has no mark
        self._generations = [0]
        self._plain, self._salted = _Floor(), _Floor()
        # all KV before this epoch was flushed
        self._least = 0
        self._embeddings_epoch = 0
        # ``kv_epoch`` of the KV that streaming sessions keep, by the session's id
        self._of_sessions: dict[str, int] = {}

    # ---- at a commit -----------------------------------------------------------------

    def over(self, kept: KeptKV, epoch: int) -> list[Req]:
        """Return the running requests whose KV is too old at ``epoch``, the oldest first."""
        over = [req for req in self._boundary.requests.running() if self._is_over(req, kept, epoch)]
        # the id makes the order the same on all ranks
        return sorted(over, key=lambda req: (record_of(req).kv_epoch, req.rid))

    def _is_over(self, req: Req, kept: KeptKV, epoch: int) -> bool:
        record = record_of(req)
        if record.weights is not None:
            return False
        most = own_bound(req)
        most = kept.running if most is None else most
        return most is not None and epoch - record.kv_epoch > most

    def begin(self, kept: KeptKV, epoch: int) -> None:
        """Apply the policy of a commit that begins ``epoch``, before later prefills."""
        self._epoch = epoch
        # a request that has recomputed its KV is like any other
        self._boundary.refreshing()
        if kept.flushes:
            self._least = epoch
        for floor, most in ((self._plain, kept.cached), (self._salted, kept.salted)):
            floor.is_bounded = most is not None
            if most is not None:
                floor.epoch = max(floor.epoch, epoch - most)
                self._begin_generation()
        for req in self._boundary.requests.running():
            if record_of(req).weights is None and record_of(req).kv_epoch < self._usable_from(req):
                self.keep_out_of_cache(req)
        self._free_sessions()
        self._forget_embeddings()
        for req in self._boundary.requests.without_kv():
            self.admit(req)

    def _begin_generation(self) -> None:
        if self._generations[-1] < self._epoch:
            self._generations = [*self._generations[1 - MOST_LOOKUPS :], self._epoch]

    def _free_sessions(self) -> None:
        there, known = self._boundary.sessions(), self._of_sessions
        self._of_sessions = {name: known[name] for name in there if name in known}
        old = {name for name in there if known.get(name, 0) < self._plain.epoch}
        # a session in its first turn is in use, and its age is its request's
        for req in self._boundary.free_sessions(old):
            if record_of(req).kv_epoch < self._plain.epoch:
                self.keep_out_of_cache(req)

    def _forget_embeddings(self) -> None:
        if self._embeddings_epoch < max(self._plain.epoch, self._salted.epoch):
            self._embeddings_epoch = self._epoch
            forget_embeddings()

    # ---- of one request --------------------------------------------------------------

    def receive(self, req: Req, *, is_of_others: bool) -> None:
        """Keep KV of a prefill server out of the cache if other weights made it.

        The key of ``req`` has this server's generation at the request's arrival, and does not show
        the prefill server's weights.
        """
        if is_of_others and self._generations[-1]:
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
        # set anew by the lookup
        record.kv_epoch = self._epoch
        self._free_too_old(req)
        if record.weights is not None:
            req.extra_key = f"{own_key(req)}{_OF_WEIGHTS}{record.weights}"
        else:
            self._mark(req, self._generation_for_new(req))

    def _free_too_old(self, req: Req) -> None:
        """Free the KV that a session would lend to ``req``, if it is over the request's bound."""
        lent = self._lent_epoch(req)
        if lent is not None and req.session is not None and lent < self._usable_from(req):
            self._boundary.free_sessions({req.session.session_id})

    def is_too_old(self, req: Req) -> bool:
        """Return whether a request like ``req`` could not use the KV under the key of ``req``."""
        return _generation_of(req) < self._usable_from(req)

    def trust_key(self, req: Req) -> None:
        """Take the key of ``req`` as it is: it is another request's, whose key was checked."""
        record_of(req).has_own_key = True

    def keep_session(self, req: Req) -> None:
        """Note the age of the KV that ``req`` leaves to its session."""
        assert req.session is not None
        self._of_sessions[req.session.session_id] = record_of(req).kv_epoch

    def choose_generation(self, req: Req, tree_cache: Any) -> None:
        """Set the key under which most of the prefix of ``req`` is cached."""
        if record_of(req).weights is not None:
            return
        generations = self._usable(req)
        best, longest = self._generation_for_new(req), 0
        # the newest first, so that it has a tie
        for generation in reversed(generations if len(generations) > 1 else []):
            self._mark(req, generation)
            length = count_cached(req, tree_cache)
            if length > longest:
                best, longest = generation, length
        self._mark(req, best)

    def note_match(self, req: Req) -> None:
        """Note the age of ``req`` after the lookup of its prefix."""
        record = record_of(req)
        if record.weights is not None or not (req.prefix_len or req.host_hit_length):
            record.kv_epoch = self._epoch
        elif (lent := self._lent_epoch(req)) is not None:
            record.kv_epoch = lent
        else:
            record.kv_epoch = _generation_of(req)

    def _lent_epoch(self, req: Req) -> int | None:
        """Return the epoch of the KV that a session lends to ``req``; None if it lends none."""
        if req.session is None or req.session.session_id not in self._boundary.sessions():
            return None
        return self._of_sessions.get(req.session.session_id)

    def _usable(self, req: Req) -> list[int]:
        """Return the generations whose KV ``req`` may use, ascending."""
        start, first = self._usable_from(req), self._generation_for_new(req)
        return sorted({first, *(each for each in self._generations if each >= start)})

    def _usable_from(self, req: Req) -> int:
        """Return the oldest epoch whose KV ``req`` may find."""
        if record_of(req).is_refreshing:
            return self._epoch
        most = own_bound(req)
        if most is not None:
            return max(self._least, self._epoch - most)
        return max(self._least, self._floor(req).epoch)

    def _generation_for_new(self, req: Req) -> int:
        """Return the generation under which ``req`` caches KV if it finds none."""
        start = self._usable_from(req)
        if not (self._floor(req).is_bounded or self._has_own_bound(req)):
            # one generation serves all versions
            return start
        if self._generations[-1] < start:
            self._begin_generation()
        return self._generations[-1]

    def _has_own_bound(self, req: Req) -> bool:
        return own_bound(req) is not None or record_of(req).is_refreshing

    def _floor(self, req: Req) -> _Floor:
        return self._salted if req.cache_salt is not None else self._plain

    def _mark(self, req: Req, generation: int) -> None:
        own = own_key(req)
        req.extra_key = f"{own}{_MARK}{generation}" if generation else own or None


@hook(
    "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req", AROUND, order=1
)
def free_turn(keep: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """Note the age of a session's KV at a turn's end, or free the KV if it is too old.

    The next turn recomputes freed KV.
    """
    session = req.session if sessions.borrowed_slot(req) is not None else None
    is_kept = keep(sessions, req)
    if is_kept and session is not None and req.finished():
        if record_of(req).is_fenced_off:
            sessions.cache.release_session(session.session_id)
        else:
            ages = _ages_of(sessions.cache)
            assert ages is not None
            ages.keep_session(req)
    return is_kept


@hook(f"{REQ}.init_next_round_input", AROUND)
def look_up(
    match: Callable[..., None], req: Req, tree_cache: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Match the prefix of ``req`` in the generation that has most of it.

    Without ``tree_cache`` a chunk continues. On a decode server the prefix was matched, and the
    rest came from the prefill server.
    """
    ages = _ages_of(tree_cache)
    if ages is None or get_disagg().disaggregation_mode == "decode":
        match(req, tree_cache, *args, **kwargs)
        return
    ages.choose_generation(req, tree_cache)
    match(req, tree_cache, *args, **kwargs)
    ages.note_match(req)


def _ages_of(tree_cache: Any) -> KVAges | None:
    """Return the object of the scheduler of ``tree_cache``; None on a server without us."""
    pool = getattr(tree_cache, "req_to_token_pool", None)
    ages: KVAges | None = getattr(getattr(pool, "inflight", None), "ages", None)
    return ages


def own_bound(req: Req) -> int | None:
    """Return the ``kv_max_age`` of a request itself; None if it has none."""
    most: int | None = custom_param(req.sampling_params, KV_MAX_AGE)
    return most


def count_cached(req: Req, tree_cache: Any) -> int:
    """Return how many tokens of ``req`` are cached under its key, on the device or the host."""
    tokens = req.origin_input_ids + req.output_ids
    key = _req_radix_key(tree_cache, req, tokens, req._compute_max_prefix_len(len(tokens)))
    found = tree_cache.match_prefix(MatchPrefixParams(key=key))
    return int(found.device_prefix_len + found.host_hit_length)


def _generation_of(req: Req) -> int:
    return int((req.extra_key or "").partition(_MARK)[2] or 0)


def own_key(req: Req) -> str:
    """Return the key without our mark, its end: no caller's text is left that reads like one."""
    return (req.extra_key or "").partition(_MARK)[0].partition(_OF_WEIGHTS)[0]


def forget_embeddings() -> None:
    """Clear the cache, on the scheduler's thread between two steps. This thread owns the cache.

    A half-done prefill encodes its images again for the next chunk.
    """
    # None if the model takes text alone
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
