"""The front end's view of its ``Worker``, in one of several tokenizer workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    from sglang_inflight.sglang_types import LoadAdapterRequest


class WorkerRole(Protocol):
    """``Worker``, without its imports: a worker holds the front end, not the reverse."""

    def end(self) -> None: ...

    async def until_answered(self) -> None: ...

    async def reload(self, request: LoadAdapterRequest) -> LoRAUpdateOutput: ...

    async def abort(self, names: list[str]) -> int: ...
