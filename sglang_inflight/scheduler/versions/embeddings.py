"""Clears SGLang's cache of multimodal embeddings.

The cache's key is the content alone, so embeddings of older weights would serve newer weights.
"""

from __future__ import annotations

from sglang.srt.managers import mm_schedule


def forget_embeddings() -> None:
    """Clear the cache, on the scheduler's thread between two steps. This thread owns the cache.

    A half-done prefill encodes its images again for the next chunk.
    """
    # None if the model takes text alone
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
