"""Adapters, and how many requests use each."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.upstream.describes import describes


@describes("sglang.srt.utils.common.ConcurrentCounter")
class ConcurrentCounter(Protocol):
    def value(self) -> int: ...


@describes("sglang.srt.lora.lora_registry.LoRARef")
class LoRARef(Protocol):
    lora_id: str


@describes("sglang.srt.lora.lora_registry.LoRARegistry")
class LoRARegistry(Protocol):
    # by the id of the adapter
    _counters: dict[str, ConcurrentCounter]

    def get_all_adapters(self) -> dict[str, LoRARef]: ...
