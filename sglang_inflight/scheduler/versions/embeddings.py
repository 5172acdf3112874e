"""What the encoders of a multimodal model made of images and the like.

SGLang keeps it by content alone, so what older weights made is taken for the newer ones'.
"""

from __future__ import annotations

from sglang.srt.managers import mm_schedule


def forget_embeddings() -> None:
    """Only the scheduler's thread may, between two steps: it is who reads and fills the cache.

    A prefill that is half done has its images encoded again for the next chunk.
    """
    # None where the model takes text alone
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
