"""Location of the shadow, and its reservation before the KV cache's."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.managers import scheduler as sglangs_scheduler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from torch import nn

from sglang_inflight.scheduler.update import reservation
from sglang_inflight.scheduler.update.checks.stageable import device_of
from sglang_inflight.scheduler.update.cost import kv_tokens_by_form, log_cost
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.reservation import reserve
from sglang_inflight.vocabulary.errors import BadSetting

GB = 1 << 30
CPU = torch.device("cpu")
ONE_RANK: dict[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "attn_dp_enabled": False,
    "tp_rank": 0,
    "tp_group": SimpleNamespace(world_size=1),
}
# a device without contents, unlike a CPU
DEVICE = torch.device("meta")
# SGLang composes the parameters at run time
ARGUMENTS: Any = ServerArgs


@dataclass
class Host:
    """The host's free memory."""

    available_gb: float = 80


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host with one rank, able to stage updates."""
    host = Host()
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=host.available_gb * GB)
    )
    with get_parallel().override(**ONE_RANK):
        yield host


@pytest.mark.parametrize("available_gb", [0, 80])
def test_auto_mode_reserves_nothing_on_a_device(host: Host, available_gb: int) -> None:
    """A server that nobody updates gives up no KV cache."""
    host.available_gb = available_gb
    reserved = reserve(server(), "auto")
    assert reserved is not None
    assert (reserved.mode, reserved.storage) == (StagingMode.CHANGES, {})


def test_device_form_costs_the_tokens_of_a_copy() -> None:
    assert kv_tokens_by_form(1000, "cuda", 10) == {"changes": 0, "host": 0, "device": 100, "off": 0}
    assert kv_tokens_by_form(1000, "cpu", 10)["host"] == 100


def test_server_without_kv_cache_has_no_costs() -> None:
    assert kv_tokens_by_form(1000, "cuda", 0.0) == {}


@pytest.mark.parametrize(("mode", "level"), [("DEVICE", "WARNING"), ("CHANGES", "INFO")])
def test_only_taken_tokens_are_warned_of(
    host: Host, caplog: pytest.LogCaptureFixture, mode: str, level: str
) -> None:
    caplog.set_level(logging.INFO)
    scheduler: Any = SimpleNamespace(device="cuda", max_total_num_tokens=1000)
    log_cost(StagingMode[mode], kv_tokens_by_form(485, "cuda", 1.0), scheduler)
    [record] = caplog.records
    assert record.levelname == level
    assert "holds 1000" in record.getMessage()
    assert "device 485" in record.getMessage()


def test_auto_mode_on_a_cpu_needs_host_memory_for_a_second_copy(host: Host) -> None:
    host.available_gb = 10
    assert choose_mode("auto", 9 * GB, CPU) is StagingMode.DEVICE
    assert choose_mode("auto", 16 * GB, CPU) is StagingMode.CHANGES


def test_device_is_that_of_a_weight_beside_the_host(host: Host) -> None:
    """SGLang may keep a table on the host, and forwards run on the device."""
    model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, device=DEVICE))
    assert device_of(model) == DEVICE
    assert device_of(nn.Linear(2, 2)) == CPU


class Worker:
    def __init__(self, role: str, model: nn.Module) -> None:
        self.model_runner = SimpleNamespace(model=model)
        self._role = role

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [(self._role, self.model_runner)]


def server() -> Any:
    """Return a target of 16 GiB, and a draft sharing it with 1 GiB of its own."""
    target = nn.Sequential(nn.Linear(2 * GB, 4, bias=False, device=DEVICE, dtype=torch.bfloat16))
    draft = nn.Sequential(
        target[0], nn.Linear(GB // 8, 4, bias=False, device=DEVICE, dtype=torch.bfloat16)
    )
    return SimpleNamespace(
        tp_worker=Worker("target", target),
        draft_worker=Worker("draft", draft),
        server_args=ARGUMENTS(model_path=""),
    )


def test_shared_weight_is_reserved_once(host: Host) -> None:
    scheduler = server()
    reserved = reserve(scheduler, "device")
    assert reserved is not None
    assert reserved.mode is StagingMode.DEVICE
    sizes = sorted(kept.storage.nbytes for kept in reserved.storage.values())
    assert sizes == [1 * GB, 16 * GB]


@pytest.mark.parametrize("wanted", ["changes", "host", "off"])
def test_modes_without_a_device_copy_reserve_nothing(host: Host, wanted: str) -> None:
    reserved = reserve(server(), wanted)
    assert reserved is not None
    assert (reserved.mode.name.lower(), reserved.storage) == (wanted, {})


@pytest.mark.parametrize("wanted", ["auto", "device"])
def test_refused_updates_reserve_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Host, wanted: str
) -> None:
    scheduler = server()
    scheduler.server_args = ARGUMENTS(model_path="", weight_cache_mode="client")
    reserved = reserve(scheduler, wanted)
    assert reserved is not None
    assert reserved.storage == {}


@pytest.mark.parametrize("wanted", ["auto", "device"])
def test_unstageable_model_reserves_nothing(host: Host, wanted: str) -> None:
    scheduler = server()
    scheduler.draft_worker.model_runner.model[1]._derived_weight_cache_error = "a cache"
    reserved = reserve(scheduler, wanted)
    assert reserved is not None
    assert reserved.storage == {}


def test_unstageable_other_rank_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    monkeypatch.setattr(reservation, "is_true_on_any_rank", lambda here: True)
    reserved = reserve(server(), "device")
    assert reserved is not None
    assert reserved.storage == {}


def test_failed_reservation_stops_the_start(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    monkeypatch.setattr(reservation, "reserve_storage", lambda weights, device: None)
    scheduler = server()
    with pytest.raises(BadSetting, match="SGLANG_INFLIGHT_STAGING=device: there are no 17408 MiB"):
        reserve(scheduler, "device")


def test_cpu_reserves_nothing_at_start() -> None:
    scheduler: Any = SimpleNamespace(
        tp_worker=Worker("target", nn.Sequential(nn.Linear(2, 2))), draft_worker=None
    )
    assert reserve(scheduler, "auto") is None


def test_sglang_loads_models_before_memory_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reservation needs all models, and the pools take the rest of the memory."""
    begun: list[str] = []
    settings = SimpleNamespace(is_startup_weight_load_overlap=False)
    monkeypatch.setattr(sglangs_scheduler, "get_model", lambda: settings)
    loading = SimpleNamespace(
        init_tp_model_worker=lambda: begun.append("target"),
        maybe_init_draft_worker=lambda: begun.append("draft"),
        init_memory_pools=lambda: sys.exit("the pools"),
    )
    with pytest.raises(SystemExit, match="the pools"):
        inspect.unwrap(Scheduler.init_model_worker)(loading)
    assert begun == ["target", "draft"]
