"""``sglang.Engine``, a front end without HTTP."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager
from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.server_args import ServerArgs


@describes("sglang.srt.entrypoints.engine.Engine")
class Engine(Protocol):
    loop: asyncio.AbstractEventLoop
    server_args: ServerArgs

    def _serialize_tensors_per_rank(self, tensors: Any, load_format: str | None) -> list[bytes]: ...

    # None on every node but the first
    @property
    def tokenizer_manager(self) -> TokenizerManager | None: ...
