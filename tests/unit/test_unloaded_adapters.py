"""Adapter of a request arriving at a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.scheduler.adapters import Adapters
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions


class Req:
    def __init__(self, lora_id: str | None) -> None:
        self.rid = "r"
        self.lora_id = lora_id
        self.extra_key = lora_id
        self.output_ids: list[int] = []
        self.weight_version_events: list[Any] = []
        self.refused: str | None = None

    def set_finish_with_abort(self, error_msg: str) -> None:
        self.refused = error_msg


@pytest.mark.parametrize(
    ("asked", "runs_with", "refused"),
    [("there", "there", None), (None, None, None), ("gone", None, "was unloaded")],
)
def test_request_of_an_unloaded_adapter_is_refused(
    asked: str | None, runs_with: str | None, refused: str | None
) -> None:
    manager = SimpleNamespace(loras={"there": object()}, lora_refs={})
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    scheduler: Any = SimpleNamespace(tp_worker=worker)
    nothing: Any = None
    adapters = Adapters(scheduler, nothing, nothing, AdapterVersions(), nothing, nothing)
    req: Any = Req(asked)
    adapters.admit(req)
    assert req.lora_id == runs_with
    assert (req.refused is None) == (refused is None)
    assert (refused or "") in (req.refused or "")
