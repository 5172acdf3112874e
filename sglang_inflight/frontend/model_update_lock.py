"""Upstream's ``model_update_lock``, which only updates with ``non_blocking=false`` take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# How often a call that waits for running requests looks whether somebody paused them.
LOOK_S = 0.05


@asynccontextmanager
async def locked(tokenizer_manager: TokenizerManager, non_blocking: bool) -> AsyncIterator[None]:
    """Upstream's meaning of a call that is not ``non_blocking``.

    It waits until no request runs and keeps new ones away meanwhile, unless the
    engine is paused. A pause that comes while it waits ends the waiting, because the
    requests it waits for then never finish (sglang#25319).
    """
    lock = tokenizer_manager.model_update_lock
    if non_blocking or tokenizer_manager.is_pause:
        yield
        return
    acquiring = asyncio.ensure_future(lock.acquire_writer())
    try:
        while not acquiring.done() and not tokenizer_manager.is_pause:
            await asyncio.wait({acquiring}, timeout=LOOK_S)
    finally:
        if not acquiring.done():
            acquiring.cancel()
            await asyncio.wait({acquiring})
    try:
        yield
    finally:
        if not acquiring.cancelled():
            await lock.release_writer()
