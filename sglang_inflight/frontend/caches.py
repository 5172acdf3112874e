"""Flush caches of computed prompts on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.capabilities import now
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.messages import FlushCall, ForgetEmbeddingsCall
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# A step may take long, and a flush waits for its end.
FLUSH_TIMEOUT_S = 120.0


class Caches:
    """Forget prefixes, image embeddings and preprocessed images.

    Lives on the front end's event loop.
    """

    def __init__(
        self, tokenizer_manager: TokenizerManager, ranks: Ranks, can: Capabilities
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._ranks = ranks
        self._can = can

    async def flush(self, *, retract: bool) -> None:
        """Forget every cached prefix, on every rank.

        ``retract`` sends running requests back to the queue, to be recomputed. Raises
        ``Conflict`` if ``retract`` is false and requests run. Raises ``Refused`` if the server's
        loop cannot retract, or a flush does not reach every tier of the cache.
        """
        if (reason := now(self._can).recompute) is not None:
            raise Refused(f"the cache cannot be flushed: {reason}")
        await self._ranks.carry_out(FlushCall(retract=retract), FLUSH_TIMEOUT_S)
        clear_preprocessed(self._tokenizer_manager)

    async def forget_embeddings(self) -> None:
        """Forget encoders' embeddings of images and other media, on every rank."""
        await self._ranks.carry_out(ForgetEmbeddingsCall(), FLUSH_TIMEOUT_S)


def clear_preprocessed(tokenizer_manager: TokenizerManager) -> None:
    """Forget preprocessed images and other media; text models have none."""
    if tokenizer_manager.mm_processor is not None:
        tokenizer_manager.mm_processor.clear_preprocess_cache()
