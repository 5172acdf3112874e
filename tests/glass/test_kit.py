"""The kit for a GPU runs on the glass card: which parts are executed, and which cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.machine import ROOT
from benchmarks.gpu import card
from benchmarks.gpu.exchanges import Wrong
from benchmarks.gpu.remapping import Took
from benchmarks.gpu.steps import exchange, host_pinned, memory, remap, torn
from harness.glass import environment
from tests.glass.card import on_card

# the steps whose kernels run in the kit's own process
STEPS = ("bandwidth", "exchange", "host_pinned", "torn", "remap")
RAN = {
    "bandwidth": ["card", "copy", "link"],
    "exchange": exchange.names(),
    "host_pinned": host_pinned.names(),
    "torn": torn.names(),
    "remap": [],
}
NOT_RUN = {
    "remap": (remap.names(), "The glass card has none of the driver's calls that map pages.")
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "benchmarks.gpu.run", "--small", "--out", str(folder))
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one run of the steps."""
    folder = tmp_path_factory.mktemp("kit")
    done = run(folder, "--only", *STEPS)
    assert done.returncode in (0, 1), done.stderr
    return folder


@pytest.mark.parametrize("step", STEPS)
def test_device_parts_run_on_the_glass_card(step: str, folder: Path) -> None:
    parts: dict[str, Any] = json.loads((folder / f"{step}.json").read_text())["parts"]
    failed = {name: part["why"] for name, part in parts.items() if part["state"] == "failed"}
    assert not failed
    names, why = NOT_RUN.get(step, ([], None))
    assert [name for name, part in parts.items() if part["state"] == "ran"] == RAN[step]
    assert {name: parts[name]["why"] for name in names} == dict.fromkeys(names, why)
    assert set(parts) == {*RAN[step], *names}


def test_page_is_never_taken_for_a_gpus(folder: Path) -> None:
    machine = json.loads((folder / "machine.json").read_text())
    assert (machine["card"], machine["is_glass"]) == (card.NO_GPU, True)
    assert card.NO_GPU in (folder / "page.md").read_text()
    done = run(folder, "--publish")
    assert done.returncode == 2
    assert f"nothing is published of a {card.NO_GPU}" in done.stderr


class Contents:
    """An arena whose halves are copied, in place of a driver that maps pages."""

    def __init__(self, size: int) -> None:
        self._row, self._other = (
            torch.zeros(size // 8, dtype=torch.int64, device=card.device()) for _ in range(2)
        )

    def tensor(self, device: torch.device) -> torch.Tensor:
        return self._row

    def exchange(self) -> Took:
        # the driver's calls are the host's, so nothing may be using the range
        card.module().synchronize()
        kept = self._row.clone()
        self._row.copy_(self._other)
        self._other.copy_(kept)
        card.module().synchronize()
        return Took(0, 0, 0)


@on_card()
def test_graph_reads_what_is_under_its_addresses_beside_a_busy_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remap, "BESIDE_BYTES", 1 << 20)
    arena: Any = Contents(1 << 16)
    values: dict[str, Any] = {}
    beside = remap.Beside()
    halves = remap.Halves(arena, card.device())
    remap.measure(values, halves, 2)
    remap.measure_beside(values, halves, beside)
    assert values["beside_exchange_us_n"] == values["other_stream_ms_n"] == remap.BESIDE_RUNS
    assert values["other_stream_ms"] > 0


@on_card()
def test_graph_that_reads_the_other_half_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena: Any = Contents(1 << 16)
    halves = remap.Halves(arena, card.device())
    monkeypatch.setattr(arena, "exchange", lambda: Took(0, 0, 0))
    with pytest.raises(Wrong, match="does not read 2 everywhere"):
        remap.measure({}, halves, 1)


@on_card(memory=64 << 20)
def test_all_memory_of_the_card_is_taken_and_given_back() -> None:
    free, size = card.module().mem_get_info()
    assert free == size
    taken = memory._take_all()
    assert card.module().mem_get_info()[0] < memory._PIECE
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(memory._PIECE, dtype=torch.uint8, device=card.device())
    taken.clear()
    card.module().empty_cache()
    assert card.module().mem_get_info() == (free, size)
