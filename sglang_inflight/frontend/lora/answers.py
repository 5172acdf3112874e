"""What calls for adapters answer with: SGLang's own answer, with more where there is more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import msgspec

    class LoRAUpdateOutput(msgspec.Struct, kw_only=True):
        success: bool
        error_message: str | None = None
        loaded_adapters: dict[str, str | None] | None = None

else:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput


class AdapterLoaded(LoRAUpdateOutput, kw_only=True):
    lora_name: str
    adapter_version: str
    # requests that go on with this adapter, and those that went back to the queue for it
    moved: int = 0
    retracted: int = 0
