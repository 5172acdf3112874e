"""The kit for a GPU keeps what a step knew when it was cut, and says what did not run."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.common.machine import ROOT
from benchmarks.gpu import card, report, run
from benchmarks.gpu.card import NotRun
from benchmarks.gpu.marked import IN_BLOCKS, LARGE, SMALL, TINY, TORN, Marked
from benchmarks.gpu.report import BEGIN, END
from benchmarks.gpu.run import ORDER, STEPS, has_failed, limit_of, run_step, steps
from benchmarks.gpu.servers import started
from benchmarks.gpu.step import CUT, UNREACHED, Step, spread, timed
from harness import marker
from tests.support.load import until

# a step that starts a process with a group of its own, as servers have, and then hangs
HANGS = """
import subprocess, sys, time
from benchmarks.gpu.step import main

def run(step):
    with step.part("first") as values:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 process_group=0)
        values["child"] = child.pid
    with step.part("second") as values:
        values["half_s"] = 1.5
        step.save()
        time.sleep(600)

main("hangs", "A step that hangs", ("first", "second", "third"), run)
"""


def test_step_that_hangs_is_cut_with_its_children_and_keeps_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hangs.json"

    class Overdue(subprocess.Popen[bytes]):
        """A process whose limit is over as soon as its step hangs, however long imports took."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and self.poll() is None:
                until("the step hangs", lambda: file.exists() and "half_s" in file.read_text())
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Overdue)
    result = run_step("hangs", (sys.executable, "-c", HANGS), tmp_path, limit_s=900, small=True)
    assert result["cut"] == "The step was cut after 900 s."
    first, second, third = (result["parts"][name] for name in ("first", "second", "third"))
    assert first["state"] == "ran"
    assert (second["state"], second["why"], second["values"]) == ("failed", CUT, {"half_s": 1.5})
    assert (third["state"], third["why"]) == ("not run", UNREACHED)
    assert has_failed(result)
    assert json.loads(file.read_text()) == result
    child: int = first["values"]["child"]
    until("the child has ended", lambda: has_ended(child))


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_step_without_a_file_is_a_failure(tmp_path: Path) -> None:
    # a file of an earlier run must not pass for this one's
    (tmp_path / "dies.json").write_text("{}")
    command = (sys.executable, "-c", "raise SystemExit(3)")
    result = run_step("dies", command, tmp_path, limit_s=60, small=True)
    (part,) = result["parts"].values()
    assert part["state"] == "failed"
    assert "status 3" in part["why"]


def test_step_after_the_whole_limit_is_not_run_and_no_failure(tmp_path: Path) -> None:
    result = run_step("late", ("/nowhere",), tmp_path, limit_s=0, small=True)
    (part,) = result["parts"].values()
    assert part["state"] == "not run"
    assert not has_failed(result)


def test_parts_go_on_after_a_failure_and_after_one_that_cannot_run(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    step = Step("step", "Three parts", ("a", "b", "c"), out=out)
    with step.part("a") as values:
        values["x_ms"] = 1.0
        raise NotRun("There is no card.")
    assert not step.failed
    with step.part("b"):
        raise ValueError("it is torn")
    with step.part("c") as values:
        values |= spread("copy_ms", [3.0, 1.0, 2.0])
    assert step.failed
    parts = json.loads(out.read_text())["parts"]
    assert [part["state"] for part in parts.values()] == ["not run", "failed", "ran"]
    assert parts["a"]["why"] == "There is no card."
    assert parts["b"]["why"] == "ValueError: it is torn"
    assert parts["c"]["values"] == {"copy_ms": 2.0, "copy_ms_p95": 3.0, "copy_ms_n": 3}


def test_warm_ups_are_not_measured() -> None:
    calls: list[None] = []
    assert len(timed(lambda: calls.append(None), runs=4, warm_ups=3)) == 4
    assert len(calls) == 7


def test_every_step_has_its_place_and_limits_end_within_the_run() -> None:
    names = steps(STEPS)
    assert {"server", "stalls", "memory", "ipc", "finished"} <= set(names)
    assert names == sorted(
        names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)
    )
    assert all(0 < limit_of(STEPS / f"{name}.py") <= 300 for name in names)


def test_run_without_a_step_of_that_name_says_which_there_are() -> None:
    command = (sys.executable, "-m", "benchmarks.gpu.run", "--small", "--only", "nosuch")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nosuch" in done.stderr
    assert "server" in done.stderr


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_server_that_does_not_start_leaves_the_others(at_once: bool) -> None:
    ended: list[str] = []

    @contextmanager
    def start(name: str) -> Iterator[str]:
        if name == "bad":
            raise RuntimeError("the server did not start")
        yield name
        ended.append(name)

    starts = {name: functools.partial(start, name) for name in ("bad", "good")}
    with started(starts, at_once=at_once) as server_of:
        with pytest.raises(RuntimeError, match="did not start"), server_of("bad"):
            pass
        with server_of("good") as server:
            assert (server, ended) == ("good", [])
    assert ended == ["good"]


# ---- the page ------------------------------------------------------------------------


def results(folder: Path, card: str | None, *, is_glass: bool = False) -> Path:
    part: dict[str, Any] = {
        "state": "ran",
        "why": None,
        "seconds": 1.0,
        "values": {
            "swap_ms": 4.0, "swap_ms_p95": 5.0, "swap_ms_n": 9, "swap_ms_limit": 3.0,
            "copy_gb_per_s": 2400.0, "copy_gb_per_s_limit": 3000.0,
            "tokens_mislabelled": 0, "tokens_mislabelled_limit": 0,
        },
    }  # fmt: skip
    absent = {"state": "not run", "why": "No card.", "values": {}, "seconds": 0.0}
    broken = {"state": "failed", "why": "E: torn\n1\n2\n", "values": {"seen": 1}, "seconds": 0.0}
    machine = {
        "date": "2030-01-02", "commit": "abc", "card": card, "is_glass": is_glass,
        "driver": "1.2", "cuda": "13.0",
        "torch": "2.11", "sglang": "0.5.23", "triton": None, "python": "3.12", "small": not card,
    }  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(machine))
    step = {"step": "swap", "title": "Swaps", "parts": {"a": part, "b": absent, "c": broken}}
    (folder / "swap.json").write_text(json.dumps(step))
    return folder


def test_page_shows_each_value_with_its_limit_and_names_what_did_not_run(tmp_path: Path) -> None:
    page = report.page(results(tmp_path, "a card"))
    assert "2030-01-02, commit abc, a card, driver 1.2" in page
    assert "| a | `swap_ms` | 4 (p95 5, n 9) | 3 | 75% |" in page
    assert "| a | `copy_gb_per_s` | 2,400 | 3,000 | 80% |" in page
    assert "| a | `tokens_mislabelled` | 0 | 0 |  |" in page
    assert "| c | `seen` | 1 |" in page
    assert "- **b**: not run. No card." in page
    assert "- **c**: failed. E: torn … 2\n" in page
    assert "swap_ms_p95" not in page


def test_page_is_replaced_between_its_markers(tmp_path: Path) -> None:
    page, limits = tmp_path / "RESULTS.md", tmp_path / "limits.md"
    for file in (page, limits):
        file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    folder = tmp_path / "results"
    folder.mkdir()
    results(folder, "a card")
    for _ in range(2):
        report.publish(folder, results=page, limits=limits)
    for file in (page, limits):
        text = file.read_text()
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"{END}\nafter\n")
        assert text.count(BEGIN) == 1
        assert "old" not in text
        assert "2030-01-02" in text
    assert "Not run: swap (b)." in limits.read_text()
    assert "Failed: swap (c)." in limits.read_text()


def test_page_of_the_glass_card_says_that_its_numbers_mean_nothing(tmp_path: Path) -> None:
    results(tmp_path, card.NO_GPU, is_glass=True)
    page = report.page(tmp_path)
    assert "abc, glass card (no GPU): numbers mean nothing. torch" in page
    assert "| a | `swap_ms` | 4 (p95 5, n 9) |  |  |" in page
    assert "| a | `copy_gb_per_s` | 2,400 |  |  |" in page
    assert "| a | `tokens_mislabelled` | 0 | 0 |  |" in page
    assert "share of" not in page
    assert report.limits_line(tmp_path) == report.NOTHING


def test_page_of_the_glass_card_is_not_published(tmp_path: Path) -> None:
    results(tmp_path, card.NO_GPU, is_glass=True)
    page = tmp_path / "RESULTS.md"
    page.write_text(old := f"{BEGIN}\nold\n{END}\n")
    with pytest.raises(ValueError, match=r"nothing is published of a glass card \(no GPU\)"):
        report.publish(tmp_path, results=page, limits=page)
    assert page.read_text() == old


def test_run_on_the_glass_card_refuses_to_publish_before_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card, "is_glass", lambda: True)
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run.main(["--publish", "--out", str(out)])
    assert "nothing is published of a glass card (no GPU)" in capsys.readouterr().err
    assert not out.exists()


def test_part_for_a_gpu_gives_its_reason_on_the_glass_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(card, "device", lambda: torch.device("cpu"))
    with pytest.raises(NotRun, match=r"^This machine has no CUDA device\.$"):
        card.need_gpu("Glass has no driver.")
    # the device of this name is the glass card's only where it is loaded
    monkeypatch.setattr(card, "device", lambda: SimpleNamespace(type=card.GLASS))
    card.need_card()
    with pytest.raises(NotRun, match=r"^Glass has no driver\.$"):
        card.need_gpu("Glass has no driver.")


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no <!-- gpu -->"):
        report.replaced("a text", "new")


def test_run_without_a_card_claims_nothing_in_the_limits(tmp_path: Path) -> None:
    line = report.limits_line(results(tmp_path, None))
    assert line == "**GPUs.** Nothing has run on a GPU yet.\n"


@pytest.mark.parametrize("file", [report.RESULTS, report.LIMITS], ids=lambda file: file.name)
def test_published_files_have_their_markers(file: Path) -> None:
    text = file.read_text()
    assert report.replaced(text, "new\n").count("new\n") >= 1


# ---- the models ----------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, SMALL, IN_BLOCKS], ids=("tiny", "small", "blocks"))
def test_marked_model_shows_layers_of_another_version(model: Marked) -> None:
    """The mark that its layers make decides between the version's token and ``TORN``."""
    old, new = model.tensors(1), model.tensors(2)
    assert made(model, new, new) == marker.token(2)
    assert made(model, old, new) == TORN


def test_large_model_has_the_bytes_that_its_comment_says() -> None:
    attention = 2 * (LARGE.heads + LARGE.kv_heads) * LARGE.head_dim
    per_layer = LARGE.hidden * (attention + 3 * LARGE.ffn)
    elements = LARGE.layers * per_layer + 2 * LARGE.vocab * LARGE.hidden
    assert 2.8e9 < 2 * elements < 3.0e9


def made(model: Marked, layers: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> int:
    """Return the greedy token of a model whose layers' MLPs are of another version."""

    def weight(name: str) -> torch.Tensor:
        values = layers[name].float()
        if model.block:
            scales = layers[f"{name}_scale_inv"]
            for dim in (0, 1):
                scales = scales.repeat_interleave(model.block, dim)
            values *= scales
        return values

    def norm(state: torch.Tensor) -> torch.Tensor:
        return state / state.square().mean().sqrt()

    state = torch.ones(model.hidden)
    for layer in range(model.layers):
        p = f"model.layers.{layer}.mlp"
        gate, up = (weight(f"{p}.{name}_proj.weight") @ norm(state) for name in ("gate", "up"))
        state = state + weight(f"{p}.down_proj.weight") @ (torch.nn.functional.silu(gate) * up)
    return int((others["lm_head.weight"].float() @ norm(state)).argmax())
