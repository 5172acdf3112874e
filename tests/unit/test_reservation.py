"""Location of the shadow, and its reservation before the KV cache's."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler
from torch import nn

from sglang_inflight import topology
from sglang_inflight.errors import BadSetting
from sglang_inflight.scheduler.memory import host as host_memory
from sglang_inflight.scheduler.update import mode, reservation
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.reservation import reserve
from sglang_inflight.settings import Settings

GB = 1 << 30
# share of the KV cache's room
HALF = 0.5
CPU = torch.device("cpu")
# a device without contents, unlike a CPU
DEVICE = torch.device("meta")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with 80 GiB free and one rank."""
    memory = SimpleNamespace(available=80 * GB)
    parallel = SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, nnodes=1, attn_dp_enabled=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for module in (host_memory, topology):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(mode, "min_over_ranks", lambda here: here)
    monkeypatch.setattr(reservation, "min_over_ranks", lambda here: here)
    monkeypatch.setattr(reservation, "is_true_on_any_rank", lambda here: here)
    monkeypatch.setattr(reservation, "why_no_update", lambda in_place: None)
    return parallel


@pytest.mark.parametrize(
    ("share", "enough", "too_little"), [(HALF, 40, 32), (Settings.staging_kv_share, 113, 110)]
)
def test_auto_mode_leaves_kv_cache_its_share(
    host: Any, share: float, enough: int, too_little: int
) -> None:
    def chosen(wanted: str, room: int) -> StagingMode:
        return choose_mode(wanted, 16 * GB, DEVICE, room=room * GB, share_of_room=share)

    assert chosen("auto", enough) is StagingMode.DEVICE
    assert chosen("auto", too_little) is StagingMode.HOST
    assert chosen("device", 1) is StagingMode.DEVICE


def test_reservation_warns_in_tokens(
    monkeypatch: pytest.MonkeyPatch, host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With 60 GiB free, SGLang leaves 8 alone, 17 are reserved, and 35 hold 1,000 tokens."""
    reserved = reserve(server(monkeypatch, free_gb=60), "auto", HALF)
    assert reserved is not None
    reserved.warn_of_its_cost(1000)
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"{17 << 10} MiB" in record.getMessage()
    assert "485 tokens" in record.getMessage()
    assert "SGLANG_INFLIGHT_STAGING=host" in record.getMessage()


def test_host_mode_does_not_warn(
    monkeypatch: pytest.MonkeyPatch, host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reserved = reserve(server(monkeypatch, free_gb=60), "host", HALF)
    assert reserved is not None
    reserved.warn_of_its_cost(1000)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "ranks",
    [{"tp_size": 8}, {"tp_size": 2, "pp_size": 4}, {"tp_size": 4, "dp_size": 2}],
    ids=str,
)
def test_host_memory_is_divided_by_ranks(host: Any, ranks: dict[str, int]) -> None:
    assert choose_mode("auto", 16 * GB, DEVICE, room=0) is StagingMode.HOST
    vars(host).update(ranks)
    assert choose_mode("auto", 16 * GB, DEVICE, room=0) is StagingMode.OFF
    assert choose_mode("auto", 16 * GB, CPU) is StagingMode.OFF
    assert choose_mode("auto", 9 * GB, DEVICE, room=0) is StagingMode.HOST


def test_attention_dp_adds_no_ranks(host: Any) -> None:
    vars(host).update(tp_size=4, dp_size=4, attn_dp_enabled=True)
    assert choose_mode("auto", 16 * GB, DEVICE, room=0) is StagingMode.HOST


def test_host_memory_is_divided_by_ranks_of_one_node(host: Any) -> None:
    vars(host).update(tp_size=8, nnodes=2)
    assert choose_mode("auto", 18 * GB, DEVICE, room=0) is StagingMode.HOST
    assert choose_mode("auto", 20 * GB, DEVICE, room=0) is StagingMode.OFF


def test_pinned_memory_is_rounded_up_like_torch(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    """The 61 GiB of Qwen2.5-32B take 114 GiB of pinned host memory."""
    hidden, ffn, layers, vocabulary = 5120, 27648, 64, 152064
    shapes = [
        *[(7168, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)] * layers,
        *[(vocabulary, hidden)] * 2,
    ]
    model = nn.Sequential(
        *[nn.Linear(n, m, bias=False, device=DEVICE, dtype=torch.bfloat16) for m, n in shapes]
    )
    assert sum(weight.nbytes for weight in model.parameters()) < 62 * GB
    scheduler = server(monkeypatch, free_gb=10)
    scheduler.tp_worker, scheduler.draft_worker = Worker("target", model), None
    for available, expected in ((80 * GB, StagingMode.OFF), (125 * GB, StagingMode.HOST)):
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda free=available: SimpleNamespace(available=free)
        )
        reserved = reserve(scheduler, "auto", HALF)
        assert reserved is not None
        assert reserved.mode is expected


class Worker:
    def __init__(self, role: str, model: nn.Module) -> None:
        self.model_runner = SimpleNamespace(
            model=model, device="cuda", gpu_id=0, pre_model_load_memory=80
        )
        self._role = role

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [(self._role, self.model_runner)]


def server(monkeypatch: pytest.MonkeyPatch, *, free_gb: float) -> Any:
    """Return a target of 16 GiB, and a draft sharing it with 1 GiB of its own."""
    target = nn.Sequential(nn.Linear(2 * GB, 4, bias=False, device=DEVICE, dtype=torch.bfloat16))
    draft = nn.Sequential(
        target[0], nn.Linear(GB // 8, 4, bias=False, device=DEVICE, dtype=torch.bfloat16)
    )
    monkeypatch.setattr(
        reservation, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.9)
    )
    monkeypatch.setattr(reservation, "get_available_gpu_memory", lambda device, gpu_id: free_gb)
    return SimpleNamespace(tp_worker=Worker("target", target), draft_worker=Worker("draft", draft))


def test_shared_weight_is_reserved_once(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    scheduler = server(monkeypatch, free_gb=60)
    reserved = reserve(scheduler, "auto", HALF)
    assert reserved is not None
    assert reserved.mode is StagingMode.DEVICE
    sizes = sorted(kept.storage.nbytes for kept in reserved.storage.values())
    assert sizes == [1 * GB, 16 * GB]


def test_sglangs_reserve_is_no_room(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    """With 40 GiB free, SGLang leaves 8 alone, and half of the rest is less than 17."""
    reserved = reserve(server(monkeypatch, free_gb=40), "auto", HALF)
    assert reserved is not None
    assert (reserved.mode, reserved.storage) == (StagingMode.HOST, {})


@pytest.mark.parametrize("wanted", ["host", "off"])
def test_host_and_off_modes_reserve_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Any, wanted: str
) -> None:
    reserved = reserve(server(monkeypatch, free_gb=60), wanted, HALF)
    assert reserved is not None
    assert (reserved.mode.name.lower(), reserved.storage) == (wanted, {})


@pytest.mark.parametrize("wanted", ["auto", "device"])
def test_refused_updates_reserve_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Any, wanted: str
) -> None:
    monkeypatch.setattr(reservation, "why_no_update", lambda in_place: "weights are shared")
    reserved = reserve(server(monkeypatch, free_gb=60), wanted, HALF)
    assert reserved is not None
    assert reserved.storage == {}


@pytest.mark.parametrize("wanted", ["auto", "device"])
def test_unstageable_model_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Any, wanted: str
) -> None:
    scheduler = server(monkeypatch, free_gb=60)
    scheduler.draft_worker.model_runner.model[1].use_intel_amx_backend = True
    reserved = reserve(scheduler, wanted, HALF)
    assert reserved is not None
    assert reserved.storage == {}


def test_unstageable_other_rank_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch, host: Any
) -> None:
    monkeypatch.setattr(reservation, "is_true_on_any_rank", lambda here: True)
    reserved = reserve(server(monkeypatch, free_gb=60), "device", HALF)
    assert reserved is not None
    assert reserved.storage == {}


def test_failed_reservation_falls_back_or_refuses(
    monkeypatch: pytest.MonkeyPatch, host: Any
) -> None:
    monkeypatch.setattr(reservation, "reserve_storage", lambda weights, device: None)
    scheduler = server(monkeypatch, free_gb=60)
    reserved = reserve(scheduler, "auto", HALF)
    assert reserved is not None
    assert (reserved.mode, reserved.storage) == (StagingMode.HOST, {})
    with pytest.raises(BadSetting, match="SGLANG_INFLIGHT_STAGING=device: there are no 17408 MiB"):
        reserve(scheduler, "device", HALF)


def test_cpu_reserves_nothing_at_start() -> None:
    scheduler: Any = SimpleNamespace(
        tp_worker=Worker("target", nn.Sequential(nn.Linear(2, 2))), draft_worker=None
    )
    assert reserve(scheduler, "auto", HALF) is None


def test_sglang_loads_models_before_memory_pools() -> None:
    """The reservation's hook depends on this order."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(Scheduler.init_model_worker)))
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    order = ["init_tp_model_worker", "maybe_init_draft_worker", "init_memory_pools"]
    assert sorted(order, key=calls.index) == order
