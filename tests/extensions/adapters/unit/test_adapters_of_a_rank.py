"""Adapters of a rank: of a request that arrives, and of the server's start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef

from sglang_inflight.extensions.adapters import on_rank as adapters
from sglang_inflight.extensions.adapters.on_rank import Adapters
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions
from sglang_inflight.vocabulary.errors import Refused


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
    of_rank = Adapters(scheduler, nothing, nothing, AdapterVersions(), nothing, on_move=nothing)
    req: Any = Req(asked)
    of_rank.admit(req)
    assert req.lora_id == runs_with
    assert (req.refused is None) == (refused is None)
    assert (refused or "") in (req.refused or "")


def test_start_ends_with_the_name_of_an_adapter_that_cannot_be_served_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise Refused("tensor 'a' holds NaN or infinity")

    monkeypatch.setattr(adapters, "check", refuse)
    manager = SimpleNamespace(
        loras={"id": object()}, lora_refs={"id": LoRARef(lora_name="policy", lora_path="/p")}
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    scheduler: Any = SimpleNamespace(tp_worker=worker, enable_lora=True)
    nothing: Any = None
    with pytest.raises(Refused, match=r"--lora-paths: the adapter 'policy': tensor 'a' holds NaN"):
        Adapters(scheduler, nothing, nothing, AdapterVersions(), nothing, on_move=nothing)
