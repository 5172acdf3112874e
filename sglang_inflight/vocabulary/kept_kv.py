"""Which KV of older weights a commit keeps, by age. Imports no SGLang.

The age of KV is the number of commits and rollbacks since the oldest forward that made a part of
it. The three names of ``kv_cache``, ``by_salt`` and ``kv_max_age`` are values of one policy:

    kv_cache       running requests   prefixes   prefixes under a cache_salt
    keep           any age            any age    any age
    by_salt        any age            0          any age
    fence          any age            0          0
    recompute      0                  0          0
    kv_max_age=k   k                  k          k

``by_salt`` is for rollouts salted by the version that they begin with (prime-rl #2270, SkyRL #1836,
torchtitan #4761): a conversation's next turn finds the turns before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_inflight.vocabulary.errors import Refused

KVPolicy = Literal["recompute", "fence", "by_salt", "keep"]
# a request's own bound, in its ``custom_params``
KV_MAX_AGE = "kv_max_age"


class KeptKV(msgspec.Struct, frozen=True, omit_defaults=True):
    """The oldest KV that may be used after a commit. None is no bound."""

    # KV of the requests that run at the commit
    running: int | None = None
    # prefixes that later requests find in the cache
    cached: int | None = None
    # the same for later requests with a ``cache_salt``
    salted: int | None = None
    # every running request is retracted at the commit, and the cache is flushed
    flushes: bool = False

    @property
    def keeps_all(self) -> bool:
        return self == KEEP

    @property
    def has_ages(self) -> bool:
        """Whether the policy tells ages apart, beyond all KV and none."""
        bounds = {self.running, self.cached, self.salted}
        return not bounds <= {None, 0} or (self.running == 0 and not self.flushes)

    def __str__(self) -> str:
        for name, named in _NAMED.items():
            if self == named:
                return f"kv_cache={name!r}"
        return f"{KV_MAX_AGE}={self.running}"


KEEP = KeptKV()
FENCE = KeptKV(cached=0, salted=0)
RECOMPUTE = KeptKV(running=0, cached=0, salted=0, flushes=True)
_NAMED: dict[KVPolicy, KeptKV] = {
    "keep": KEEP,
    "by_salt": KeptKV(cached=0),
    "fence": FENCE,
    "recompute": RECOMPUTE,
}


def choose_kept_kv(
    kv_cache: KVPolicy | None, kv_max_age: int | None, *, flush_cache: bool
) -> KeptKV:
    """Return the policy of a call; ``kv_cache`` and ``kv_max_age`` override ``flush_cache``.

    Raises ``Refused`` if the call has both.
    """
    if kv_cache is not None and kv_max_age is not None:
        raise Refused(
            f"kv_cache={kv_cache!r} and {KV_MAX_AGE}={kv_max_age} are two policies: pass one"
        )
    if kv_max_age is not None:
        return KeptKV(running=kv_max_age, cached=kv_max_age, salted=kv_max_age)
    return _NAMED[kv_cache or ("recompute" if flush_cache else "fence")]


def require_recompute(kept: KeptKV, kv_scale: str | None, what: str) -> None:
    """Raise ``Refused`` if KV quantized by one scale would be read by another.

    ``kv_scale``: a scale that ``what`` changes, with its values, or None.
    """
    if kv_scale is not None and not kept.flushes:
        raise Refused(
            f"{what} changes {kv_scale}, by which KV is quantized, and {kept} keeps "
            'KV of the old scale: pass kv_cache="recompute"'
        )
