"""A proxy between TRL and the server, which records what was served by which weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.server import Server
from tests.support.proxy import Proxy

COMPLETIONS = "/v1/completions"
LOAD_ADAPTER = "/v1/load_lora_adapter"
FINISH_UPDATE = "/finish_weight_update"


@dataclass(frozen=True)
class Completion:
    """A rollout's request and its answer."""

    body: dict[str, Any]
    status: int
    answer: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.answer["choices"][0]
        return choice


class Recorder(Proxy):
    """Keeps each completion, and each policy under the name that the server gives to it.

    TRL asks for no versions of tokens, so its requests are sent on with
    ``return_weight_versions``, and are otherwise unchanged.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server)
        self._folder = folder
        # file that holds the weights that a trainer sends next
        self.synced: Path | None = None
        self.completions: list[Completion] = []
        # weights by epoch, and adapters' folders by version
        self.weights: dict[int, Path] = {}
        self.adapters: dict[str, Path] = {}
        # adapter version: name in the load
        self.names: dict[str, str] = {}

    def _forward(self, method: str, path: str, body: bytes) -> httpx.Response:
        if path == COMPLETIONS:
            return self._complete(method, path, json.loads(body))
        if path == LOAD_ADAPTER:
            return self._load(method, path, body)
        answer = super()._forward(method, path, body)
        if path == FINISH_UPDATE and answer.status_code == httpx.codes.OK:
            assert self.synced is not None
            epoch = self._server.get("/inflight/status")["epoch"]
            self.weights[epoch] = self._folder / f"epoch-{epoch}.safetensors"
            shutil.copyfile(self.synced, self.weights[epoch])
        return answer

    def _complete(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        asked = json.dumps({**body, "return_weight_versions": True}).encode()
        answer = super()._forward(method, path, asked)
        self.completions.append(Completion(body, answer.status_code, answer.json()))
        return answer

    def _load(self, method: str, path: str, body: bytes) -> httpx.Response:
        said = json.loads(body)
        kept = self._folder / f"adapter-{len(self.adapters)}"
        # TRL removes the folder some syncs later
        shutil.copytree(said["lora_path"], kept)
        answer = super()._forward(method, path, body)
        if answer.status_code == httpx.codes.OK:
            version = answer.json()["adapter_version"]
            self.adapters[version] = kept
            self.names[version] = said["lora_name"]
        return answer
