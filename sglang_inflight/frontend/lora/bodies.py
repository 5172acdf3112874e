"""Bodies of adapter calls: SGLang's fields first, then ours."""

from __future__ import annotations

from typing import Any, Literal

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    UnloadLoRAAdapterReqInput,
)

from sglang_inflight.frontend.bodies import Body, Name, Version, check_version
from sglang_inflight.messages import AdapterKVPolicy, LoadAdapter, LoadAdapterFromTensors
from sglang_inflight.vocabulary.errors import Refused


class LoadAdapterBody(Body, kw_only=True):
    """Fields of every load of an adapter."""

    lora_name: Name
    pinned: bool = False
    # ignored: SGLang gives a new id
    lora_id: str | None = None
    # take the name from a loaded adapter
    replace: bool = False
    adapter_version: Version | None = None
    # whether requests of the replaced adapter finish with it or move to the new one
    running: Literal["finish", "move"] = "finish"
    # of moved requests
    kv_cache: AdapterKVPolicy | None = None

    def __post_init__(self) -> None:
        check_version(self.adapter_version)
        if self.running == "move" and not self.replace:
            raise Refused('running="move" needs replace=true: a new name has no requests to move')
        if self.kv_cache is not None and self.running != "move":
            raise Refused('kv_cache needs running="move": it is for the KV of moved requests')

    @property
    def kv_policy(self) -> AdapterKVPolicy:
        return self.kv_cache or "recompute"

    @property
    def path(self) -> str | None:
        """Folder of the adapter; None for tensors."""
        return None

    def request(self, name: str, version: str) -> LoadAdapter | LoadAdapterFromTensors:
        """Return SGLang's request: load as ``name``; later requests use ``lora_name``."""
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
    # ignored: SGLang looks the id up
    lora_id: str | None = None
    # answer at once: hide the adapter from new requests, unload it after its last request
    non_blocking: bool = False
