"""SGLang's messages read by us, from ``sglang.srt.managers.io_struct``."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from sglang_inflight.sglang_types.describes import describes

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
