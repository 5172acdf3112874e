"""Steps of the GPU kit that measure the device: what they check, tried on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import exchanges, weights
from benchmarks.gpu.exchanges import Wrong, measure_changes, measure_copies
from benchmarks.gpu.step import Step
from benchmarks.gpu.steps import bandwidth, exchange, host_pinned, remap, torn
from benchmarks.gpu.weights import Sizes
from sglang_inflight.scheduler.update.changes.encoding import bits_of
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import ContentSwap

TINY = Sizes(1, 64, 64, 128, 64, 100, True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "RUNS", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kit itself runs on this machine's GPU")
@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (bandwidth, ["card", "copy", "link"]),
        (exchange, exchange.names()),
        (host_pinned, host_pinned.names()),
        (torn, torn.names()),
        (remap, remap.names()),
    ],
)
def test_step_runs_its_parts_and_no_others(
    module: ModuleType, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models(*, small: bool) -> dict[str, Sizes]:
        return {"smaller model": TINY, "larger model": TINY}

    monkeypatch.setattr(weights, "models", models)
    for one in (exchange, host_pinned):
        monkeypatch.setattr(one, "models", models)
    monkeypatch.setattr(bandwidth, "SMALL", 1 << 20)
    out = tmp_path / "step.json"
    module.run(Step("step", "A step", parts, out=out, small=True))
    found = json.loads(out.read_text())["parts"]
    assert list(found) == parts
    why = {part["why"] for part in found.values()}
    assert why <= {None, "This machine has no CUDA device."}
    ran = {name for name, part in found.items() if part["state"] == "ran"}
    on_a_cpu = {bandwidth: {"copy"}, exchange: set(parts)}
    assert ran == on_a_cpu.get(module, set())


@pytest.mark.parametrize("share", exchanges.SHARES)
def test_exchange_of_changes_is_measured(share: float) -> None:
    values: dict[str, Any] = {}
    sizes = Sizes(1, 64, 64, 128, 64, 2000, True)
    measure_changes(values, sizes, share)
    elements = sizes.nbytes // 2
    assert values["exchanged_elements"] == pytest.approx(share * elements, rel=0.2)
    assert values["values_bytes"] == 2 * values["exchanged_elements"]
    # both sides are read and written, and the offsets are read
    offsets = values["changes_bytes"] - values["values_bytes"]
    assert values["moved_bytes"] == 4 * values["values_bytes"] + offsets
    assert (offsets == 0) == (share == 1)
    # not more than all of the weights, besides what is kept
    most = 2 * sizes.nbytes + 2 * values["values_bytes"] + offsets
    assert values["moved_bytes"] <= values["sectors_bytes"] <= most
    assert values["exchange_ms_n"] == 2


def test_exchange_of_copies_is_measured() -> None:
    values: dict[str, Any] = {}
    measure_copies(values, TINY)
    assert values["moved_bytes"] == 4 * values["weights_bytes"]
    assert values["exchange_ms_n"] == 2


def test_weights_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "make", lambda self: 0)
    with pytest.raises(Wrong, match="not the new ones"):
        measure_changes({}, TINY, 0.1)


def test_weights_that_do_not_come_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: ContentSwap, live: torch.Tensor, shadow: torch.Tensor) -> None:
        live.copy_(shadow)

    monkeypatch.setattr(ContentSwap, "swap", copy)
    with pytest.raises(Wrong, match="not the old ones"):
        measure_copies({}, TINY)


def test_checksum_notices_one_bit_and_two_weights_exchanged() -> None:
    live = weights.make(TINY, CPU)
    before = weights.checksum(live)
    assert weights.checksum(weights.make(TINY, CPU)) == before
    assert weights.checksum(live[::-1]) != before
    bits = bits_of(live[2])
    bits[-1] ^= 1
    assert weights.checksum(live) != before


def trial(form: str, exchanges: int = 4) -> torn.Trial:
    return torn.Trial(TINY, form, overlaps=True, exchanges=exchanges)


@pytest.mark.parametrize("form", torn.FORMS)
@pytest.mark.parametrize(
    ("order", "first"), [(lambda trial: torn.our_order(trial, {}), 0), (torn.two_versions, 1)]
)
def test_forwards_read_the_versions_in_turns(
    form: str, order: Callable[[torn.Trial], list[int]], first: int
) -> None:
    torn.expect(order(trial(form)), first)


@pytest.mark.parametrize("form", torn.FORMS)
def test_torn_weights_are_noticed(form: str) -> None:
    """Here half of an exchange has been made when a forward runs."""
    one = trial(form, exchanges=2)
    one.launch(0)
    live = one.forwards._live[0]
    before = live.clone()
    one.swap.make()
    live[: len(live) // 2] = before[: len(live) // 2]
    one.forwards.launch(torn.FORWARDS_EACH)
    live.copy_(before)
    versions = one.forwards.versions(one._sums)
    assert versions[: torn.FORWARDS_EACH] == [0] * torn.FORWARDS_EACH
    assert versions[torn.FORWARDS_EACH] == torn.TORN
    with pytest.raises(Wrong, match="1 of them torn weights; the first is number 6"):
        torn.expect(versions[: torn.FORWARDS_EACH + 1], 0)


def test_forwards_of_the_wrong_version_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveWeights, "_swap", lambda self, swap: 0)
    with pytest.raises(Wrong, match=r"12 of 24 forwards .* 0 of them torn"):
        torn.expect(torn.our_order(trial("changes"), {}), 0)


def test_values_of_a_step_that_was_cut_are_not_used(tmp_path: Path) -> None:
    step = Step("one", "A step", ["part"], out=tmp_path / "one.json")
    other = Step("other", "Another step", ["part"], out=tmp_path / "other.json")
    assert other.found("none", "part") == {}
    assert other.found("one", "none") == {}
    with step.part("part") as values:
        values["number"] = 1
        step.save()
        assert other.found("one", "part") == {}
    assert other.found("one", "part") == {"number": 1}


def test_limits_are_those_of_the_measured_rates() -> None:
    values: dict[str, Any] = {"moved_bytes": 3e9, "sectors_bytes": 6e9, "exchange_ms": 4.0}
    exchange.compare(values, 3e12)
    assert values["exchange_ms_limit"] == 1
    assert values["copy_bandwidth_share_in_sectors"] == 0.5
    link = {"to_card_bytes_per_s": 5e10, "from_card_bytes_per_s": 4e10}
    values = {}
    host_pinned.compare(values, link | {"both_ways_bytes_per_s": 8e10}, 2 * 10**9, 2 * 10**9)
    assert values["exchange_ms_limit"] == 50
