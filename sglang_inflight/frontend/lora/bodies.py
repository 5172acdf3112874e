"""What callers may send of adapters. SGLang's fields, then ours."""

from __future__ import annotations

from typing import Any, Literal

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    UnloadLoRAAdapterReqInput,
)

from sglang_inflight.errors import Refused
from sglang_inflight.frontend.bodies import Body, Name, Version, check_version
from sglang_inflight.messages import AdapterKVPolicy, LoadAdapter, LoadAdapterFromTensors


class LoadAdapterBody(Body, kw_only=True):
    """What every load of an adapter has."""

    lora_name: Name
    pinned: bool = False
    # SGLang gives it another
    lora_id: str | None = None
    # take the name from the adapter that has it
    replace: bool = False
    adapter_version: Version | None = None
    # what becomes of requests that have the adapter whose name it takes
    running: Literal["finish", "move"] = "finish"
    # of those that move
    kv_cache: AdapterKVPolicy | None = None

    def __post_init__(self) -> None:
        check_version(self.adapter_version)
        if self.running == "move" and not self.replace:
            raise Refused('running="move" needs replace=true: no request has a new adapter')
        if self.kv_cache is not None and self.running != "move":
            raise Refused('kv_cache is of requests that move: it needs running="move"')

    @property
    def kv_policy(self) -> AdapterKVPolicy:
        return self.kv_cache or "recompute"

    @property
    def path(self) -> str | None:
        """The folder that it comes from."""
        return None

    def request(self, name: str, version: str) -> LoadAdapter | LoadAdapterFromTensors:
        """To load it as ``name``, for requests that call it ``lora_name``."""
        raise NotImplementedError


class LoadFolderBody(LoadAdapterBody, kw_only=True):
    sglang = LoadLoRAAdapterReqInput

    lora_path: Name

    @property
    def path(self) -> str | None:
        return self.lora_path

    def request(self, name: str, version: str) -> LoadAdapter:
        return LoadAdapter(
            lora_name=name,
            lora_path=self.lora_path,
            pinned=self.pinned,
            adapter=self.lora_name,
            adapter_version=version,
        )


class LoadTensorsBody(LoadAdapterBody, kw_only=True):
    sglang = LoadLoRAAdapterFromTensorsReqInput

    config_dict: dict[str, Any]
    serialized_named_tensors: list[bytes]
    added_tokens_config: dict[str, int] | None = None
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None

    def request(self, name: str, version: str) -> LoadAdapterFromTensors:
        return LoadAdapterFromTensors(
            lora_name=name,
            config_dict=self.config_dict,
            serialized_named_tensors=self.serialized_named_tensors,
            pinned=self.pinned,
            added_tokens_config=self.added_tokens_config,
            load_format=self.load_format,
            expected_checksums=self.expected_checksums,
            adapter=self.lora_name,
            adapter_version=version,
        )


class UnloadAdapterBody(Body, kw_only=True):
    sglang = UnloadLoRAAdapterReqInput

    lora_name: Name
    # SGLang looks it up
    lora_id: str | None = None
    # answer at once: no request finds it any more, and it goes with the last that has it
    non_blocking: bool = False
