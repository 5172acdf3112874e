"""``sglang.Engine``, which is a front end without HTTP."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager
from sglang_inflight.upstream.describes import describes


@describes("sglang.srt.entrypoints.engine.Engine")
class Engine(Protocol):
    loop: asyncio.AbstractEventLoop

    # None on every node but the first
    @property
    def tokenizer_manager(self) -> TokenizerManager | None: ...
