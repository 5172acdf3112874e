"""What is kept of prompts that were computed, across all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.errors import Refused
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.tiers import why_cache_cannot_be_flushed
from sglang_inflight.messages import FlushCall, ForgetEmbeddingsCall
from sglang_inflight.unsupported import why_no_retraction

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

# A step may take long, and a flush waits for its end.
FLUSH_TIMEOUT_S = 120.0


class Caches:
    """Forgets prefixes, and images in both their forms. Lives on the front end's event loop."""

    def __init__(self, tokenizer_manager: TokenizerManager, ranks: Ranks) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._ranks = ranks

    async def flush(self, *, retract: bool) -> None:
        """Forget every cached prefix, on every rank.

        ``retract`` sends running requests back to the queue, to be recomputed. Raises
        ``Conflict`` where it is false and requests run, ``Refused`` where the server's loop
        cannot retract, or the cache has tiers that a flush does not reach.
        """
        if (reason := why_no_retraction()) is not None:
            raise Refused(f"running requests cannot be retracted: {reason}")
        if (reason := why_cache_cannot_be_flushed()) is not None:
            raise Refused(f"the cache cannot be flushed: {reason}")
        await self._ranks.carry_out(FlushCall(retract=retract), FLUSH_TIMEOUT_S)
        clear_preprocessed(self._tokenizer_manager)

    async def forget_embeddings(self) -> None:
        """Forget what encoders made of images and the like, on every rank."""
        await self._ranks.carry_out(ForgetEmbeddingsCall(), FLUSH_TIMEOUT_S)


def clear_preprocessed(tokenizer_manager: TokenizerManager) -> None:
    """Forget preprocessed images and the like; models for text have none."""
    if tokenizer_manager.mm_processor is not None:
        tokenizer_manager.mm_processor.clear_preprocess_cache()
