"""A test plugin for SGLang: a hierarchical cache keeps no memory of the host free.

SGLang refuses to start while less than 10 GB stay free beside the cache. Other tests' servers take
memory at any moment, and a cache of the tests has a few MB.
"""

from __future__ import annotations

from sglang.srt.mem_cache.pool_host import base


def install() -> None:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
