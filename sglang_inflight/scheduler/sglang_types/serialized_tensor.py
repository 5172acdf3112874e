"""A serialized tensor, with one payload per rank."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.model_executor.model_runner_components.weight_updater.LocalSerializedTensor")
class SerializedTensor(Protocol):
    # one payload per tensor-parallel rank
    values: list[Any]
