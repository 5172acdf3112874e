"""Messages of adapters between the front end and the ranks."""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
)

from sglang_inflight.messages import Call, Done, RankAnswer
from sglang_inflight.vocabulary.bodies import AdapterKVPolicy

# end of a rank's error text when it refuses to unload an adapter; starts with a count
ADAPTER_IN_USE = "requests of it have not ended"


class RequestsMoved(RankAnswer, kw_only=True):
    # requests moved to the other adapter
    rids: list[str]
    # requests sent back to the queue
    retracted: int


class AdapterChecked(RankAnswer, kw_only=True):
    # digest of the adapter's configuration and tensors, if the call asks for it
    digest: str | None


class CheckAdapterCall(Call, kw_only=True):
    """Check an adapter right after its load, before a request knows it."""

    answer = AdapterChecked

    lora_id: str
    asks_digest: bool


class NameAdaptersCall(Call, kw_only=True):
    """Give a name to another adapter."""

    answer = Done

    # adapter's id -> name
    names: dict[str, str]


class MoveRequestsCall(Call, kw_only=True):
    """Move one adapter's requests to another adapter at this step boundary."""

    answer = RequestsMoved
    at_boundary: ClassVar[bool] = True

    from_id: str
    to_id: str
    kv_cache: AdapterKVPolicy

    def drains_pipeline(self) -> bool:
        return False


class LoadAdapter(LoadLoRAAdapterReqInput, kw_only=True):
    """SGLang's own request, handled and answered by SGLang, with our fields.

    Requests name the adapter by ``adapter``. ``lora_name`` differs while ``adapter`` still
    names the predecessor: ranks use it until the adapter is renamed. ``digest`` is of an earlier
    load of this version: an evicted adapter must come back as it was.
    """

    adapter: str
    adapter_version: str
    digest: str | None = None


class LoadAdapterFromTensors(LoadLoRAAdapterFromTensorsReqInput, kw_only=True):
    """``LoadAdapter`` with tensors instead of a path."""

    adapter: str
    adapter_version: str
