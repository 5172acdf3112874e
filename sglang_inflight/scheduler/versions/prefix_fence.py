"""Which weights made which cached prefix.

SGLang's radix cache looks a prefix up under a request's ``extra_key``. The fence makes
the weights' epoch part of that key. After a fencing commit a request that starts its
prefill is looked up under the new epoch, finds nothing older, and fills its own; running
requests keep their key, and with it their KV, which is not put into the cache any more.
Nothing is flushed and no tree is walked: old entries are never looked up again and no older
ones come, so they are the least recently used, and the first to be evicted.

A streaming session looks nothing up: it keeps the KV of its last request, and lends it to the
next. It lets go of it, at once or when the request ends that runs on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.versions.embeddings import forget_embeddings
from sglang_inflight.scheduler.versions.request_record import record_of

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import Req

_MARK = "|inflight-epoch:"


class PrefixFence:
    """The epoch under which prefixes are cached. Only the scheduler's thread touches it."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._epoch = 0

    def raise_to(self, epoch: int) -> None:
        """No request that starts its prefill from now on reuses an older prefix."""
        self._epoch = epoch
        for req in self._boundary.running_requests():
            self.keep_out(req)
        for req in self._boundary.free_sessions():
            self.keep_out(req)
        forget_embeddings()
        for req in self._boundary.requests_without_kv():
            self.admit(req)

    def receive(self, req: Req, *, is_of_others: bool) -> None:
        """A prefill server's KV is there for ``req``, made by other weights than serve here or not.

        Its key says when the request came, and not what that server's weights were.
        """
        if is_of_others and self._epoch:
            self.keep_out(req)

    def keep_out(self, req: Req) -> None:
        """What ``req`` holds now is put into no cache."""
        record = record_of(req)
        if not record.is_fenced_off:
            record.is_fenced_off, record.was_kept_out = True, req.skip_radix_cache_insert
            req.skip_radix_cache_insert = True

    def admit(self, req: Req) -> None:
        """Called for each request that enters the waiting queue, new or retracted."""
        if req.kv.retraction_backup is not None:
            # retracted, and its KV comes back: under its old key, if it is cached at all
            return
        record = record_of(req)
        if record.is_fenced_off:
            # retracted: it holds nothing of the old weights
            req.skip_radix_cache_insert = record.was_kept_out
            record.is_fenced_off = False
        if self._epoch == 0:
            return
        own_key = (req.extra_key or "").partition(_MARK)[0]
        req.extra_key = f"{own_key}{_MARK}{self._epoch}"
