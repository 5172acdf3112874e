"""SGLang's messages, from ``sglang.srt.managers.io_struct``, and their dispatch to handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from sglang_inflight.sglang_types.describes import describes

D = TypeVar("D")


@describes("sglang.utils.TypeBasedDispatcher")
class TypeBasedDispatcher(Protocol):
    """``_mro_cache`` caches the handlers of types missing in ``_mapping``, found by a base."""

    _mapping: dict[type, Callable[[Any], Any]]
    _mro_cache: dict[type, Any]

    def __iadd__(self: D, other: Any) -> D: ...


@describes("sglang.srt.sampling.sampling_params.SamplingParams")
class SamplingParams(Protocol):
    # SGLang passes unknown parameters here; a dict, unless a client sent another type
    custom_params: Any
    stop_token_ids: set[int] | None
    min_new_tokens: int
    top_k: int
    repetition_penalty: float
    logit_bias: dict[str, float] | None


@describes("sglang.srt.utils.weight_versions.WeightVersionSpan")
class WeightVersionSpan(Protocol):
    version: str
    start: int
    end: int


_IO = "sglang.srt.managers.io_struct"


@describes(f"{_IO}.BaseReq")
class Request(Protocol):
    """A request, with ``http_worker_ipc`` as the address for its answer."""

    rid: str | None
    http_worker_ipc: str | None


@describes(f"{_IO}.AbortReq")
class AbortRequest(Request, Protocol):
    """An abort of one request, or of all."""

    abort_all: bool
    abort_message: str | None
    finished_reason: Any


@describes(f"{_IO}.PauseGenerationReqInput")
class PauseRequest(Request, Protocol):
    mode: Literal["abort", "in_place", "retract"]


@describes(f"{_IO}.ContinueGenerationReqInput")
class ContinueRequest(Request, Protocol):
    torch_empty_cache: bool


@describes(f"{_IO}.BatchTokenizedGenerateReqInput", f"{_IO}.BatchTokenizedEmbeddingReqInput")
class BatchRequest(Protocol):
    batch: list[Request]


@describes(f"{_IO}.OpenSessionReqInput")
class OpenSessionRequest(Request, Protocol):
    session_id: str | None


@describes(f"{_IO}.SlowDownReqInput")
class SlowDownRequest(Request, Protocol):
    forward_sleep_time: float | None


@describes(f"{_IO}.LoadLoRAAdapterReqInput", f"{_IO}.LoadLoRAAdapterFromTensorsReqInput")
class LoadAdapterRequest(Request, Protocol):
    lora_name: str
    # None until the front end has assigned an id
    lora_id: str | None


@describes(f"{_IO}.UnloadLoRAAdapterReqInput")
class UnloadAdapterRequest(Request, Protocol):
    lora_name: str
    lora_id: str | None


@describes(f"{_IO}.UpdateWeightsFromTensorReqInput")
class UpdateFromTensorRequest(Request, Protocol):
    serialized_named_tensors: list[str | bytes]


@describes(f"{_IO}.ReleaseMemoryOccupationReqInput", f"{_IO}.ResumeMemoryOccupationReqInput")
class MemoryRequest(Request, Protocol):
    tags: list[str] | None


@describes(f"{_IO}.CheckWeightsReqInput")
class CheckWeightsRequest(Request, Protocol):
    action: str


@describes(f"{_IO}.RpcReqInput")
class RpcRequest(Request, Protocol):
    """A call of a scheduler's ``method``."""

    method: str
