"""Answers to adapter calls: SGLang's own fields, then ours."""

from __future__ import annotations

from sglang.srt.managers.io_struct import LoRAUpdateOutput


class AdapterLoaded(LoRAUpdateOutput, kw_only=True):
    lora_name: str
    adapter_version: str
    # requests moved to this adapter, and how many of them went back to the queue
    moved: int = 0
    retracted: int = 0
