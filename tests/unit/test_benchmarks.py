"""The benchmarks' page tells what their JSON files hold, and nothing else."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import typer
from typer.main import get_command

from benchmarks import parts, pictures, results
from benchmarks.__main__ import find_peers, outcome
from benchmarks.common.folder import Folder, Result
from benchmarks.common.links import NoLinks, links
from benchmarks.common.load import Arrival, Load
from benchmarks.common.machine import ROOT
from benchmarks.common.plots import Bar, Panel, draw
from benchmarks.common.report import Report, Summary
from benchmarks.common.sharded_trainer import Way
from benchmarks.common.trainer import COPIED_BYTES
from benchmarks.common.trainer import _Sender as Sender
from benchmarks.front_door import Answered, Window
from benchmarks.gpu.report import BEGIN, END
from benchmarks.pictures import PANELS, TIMELINE, rates_in_bins
from benchmarks.plan import ABOUT, PLAN, chosen
from benchmarks.small_tensors import Found, Steps, cells, known_ways
from benchmarks.sustained import over
from benchmarks.thrown_away import prefilled_by
from benchmarks.timeline import arrivals_around, longest_silence
from sglang_inflight.client.shard_sender import BUCKET_BYTES

FULL = {each.name: each for each in PLAN}
RUN: dict[str, Any] = {
    "date": "2030-01-02", "commit": "abc", "versions": {"python": "3.11", "sglang": "0.5.23"},
    "command": "python -m benchmarks.commit_size --rounds 2", "quick": False, "load": 0.25,
    "seconds": 61.0, "copy_bytes_per_s": 5e9, "left_out": {}, "state": "ran", "why": None,
}  # fmt: skip


# ---- reports ------------------------------------------------------------------------


def commit_size() -> Report:
    report = Report(
        "commit_size",
        ("model", "MB", "ours", "upstream", "ms/GB", "ratio", "step"),
        {"rounds": 2},
        notes=["a|b"],
        facts={"model_bytes": {"135m": 250_000_000}},
    )
    report.add(
        model="135m",
        megabytes=250.0,
        ours_ms=Summary.of([0.5, 0.625, 0.75]),
        upstream_ms=Summary.of([120.0]),
        upstream_ms_per_gb=None,
        ratio=192.0,
        step_ms=Summary.of([90.0, 110.0]),
    )
    report.goal("135m: commit, ms, below 1", 0.625, at_most=1)
    report.goal("1.5b over 135m: commit, at most 2", 2.5, at_most=2)
    return report


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report, file = commit_size(), tmp_path / "commit_size.json"
    report.write(file)
    read = Report.read(file)
    assert read.rows == report.rows
    assert read.goals == report.goals
    assert list(read.columns) == list(report.columns)
    assert (read.notes, read.facts, read.options) == (report.notes, report.facts, report.options)


def test_table_has_a_median_with_its_range_and_leaves_missing_cells_empty() -> None:
    *_, row = results.table(commit_size())
    assert row == "| 135m | 250 | 0.625 (0.5 to 0.75) | 120 |  | 192 | 100 (90 to 110) |"


@pytest.mark.parametrize(
    ("value", "bounds", "is_met"),
    [
        (1.0, {"at_most": 1}, True),
        (1.01, {"at_most": 1}, False),
        (0.99, {"at_least": 0.99}, True),
        (0.98, {"at_least": 0.99}, False),
        (float("nan"), {"at_most": 1}, False),
    ],
)
def test_goal_is_met_up_to_its_bound(value: float, bounds: dict[str, float], is_met: bool) -> None:
    report = Report("a", (), {})
    report.goal("a goal", value, **bounds)
    assert [goal.is_met for goal in report.goals] == [is_met]


def test_limit_of_an_update_is_a_copy_of_its_model_at_the_measured_bandwidth() -> None:
    result = Result(FULL["commit_size"], RUN, commit_size())
    assert result.copy_s("135m") == 0.05
    assert result.copy_s("1.5b") is None


# ---- the page -----------------------------------------------------------------------


def folder_of(path: Path, **changes: Any) -> Folder:
    folder = Folder.open(path)
    planned = FULL["commit_size"]
    commit_size().write(folder.file(planned))
    folder.note(planned, {**RUN, **changes})
    return Folder.read(path)


def test_page_tells_how_each_benchmark_ran_and_which_goals_it_missed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, left_out={"vllm": "there is no network."})
    folder.note(FULL["sleep"], {**RUN, "state": "was cut", "why": "it had not ended after 9 s."})
    text = results.write(folder).read_text()
    assert "Goals met: 1 of 2. Missed:" in text
    assert "- commit_size: 1.5b over 135m: commit, at most 2: **2.5**" in text
    assert "- **Missed**: 1.5b over 135m" in text
    assert "- Met: 135m: commit, ms, below 1: **0.625**" in text
    assert "2030-01-02, commit abc. python 3.11, sglang 0.5.23. The load was 0.25 before" in text
    assert "    python -m benchmarks.commit_size --rounds 2\n" in text
    assert "one copy of the weights of 135m (250 MB) takes 0.05 s" in text
    assert "- vllm was not run: there is no network." in text
    assert "This benchmark **was cut**: it had not ended after 9 s." in text
    assert folder.machine["cpu"] in text
    assert "Quick run" not in text
    for link in re.findall(r"\]\((pictures/[^)]+)\)", text):
        assert (tmp_path / link).exists()


def test_page_of_a_quick_run_says_so(tmp_path: Path) -> None:
    assert "**Quick run" in results.write(folder_of(tmp_path, quick=True)).read_text()


def test_published_page_replaces_the_last_one_and_keeps_the_part_about_gpus(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks" / "RESULTS.md"
    page.parent.mkdir()
    gpu = f"{BEGIN}\n## gpu\nIt ran on a card.\n{END}\n"
    page.write_text(f"# Results\nlast year\n\n{gpu}")
    folder = folder_of(tmp_path / "run")
    for _ in range(2):
        results.publish(folder, page=page, into=tmp_path / "docs" / "pictures")
        text = page.read_text()
        assert text.endswith(gpu)
        assert text.count(BEGIN) == 1
        assert "last year" not in text
        assert "![commit_size](../docs/pictures/commit_size.png)" in text


def test_page_without_a_part_about_gpus_says_that_none_ran() -> None:
    assert "has not run on a GPU" in results.gpu_part("# Results\n")


def test_results_of_another_machine_are_refused(tmp_path: Path) -> None:
    folder_of(tmp_path)
    file = tmp_path / "machine.json"
    content = json.loads(file.read_text())
    content["machine"]["cpu"] = "another"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="another folder"):
        Folder.open(tmp_path)


# ---- pictures -----------------------------------------------------------------------


def test_same_results_give_the_same_picture(tmp_path: Path) -> None:
    result = Result(FULL["commit_size"], RUN, commit_size())
    names = [pictures.draw_all([result], tmp_path / name) for name in ("a", "b")]
    assert names == [["commit_size", "summary"]] * 2
    for name in names[0]:
        content = [(tmp_path / each / f"{name}.png").read_bytes() for each in ("a", "b")]
        assert content[0] == content[1]


def test_commit_has_a_step_for_its_limit() -> None:
    (panel,) = PANELS["commit_size"]([Result(FULL["commit_size"], RUN, commit_size())])
    assert panel.limit == pictures.ONE_STEP
    assert [(bar.server, bar.value, bar.limit) for bar in panel.bars] == [
        ("ours", 0.625, 100),
        ("upstream", 120, 100),
    ]
    assert panel.is_log


def test_bars_of_zero_can_be_drawn(tmp_path: Path) -> None:
    bars = [Bar("a", "ours", 0.0, limit=0.0), Bar("b", "upstream", 0.0)]
    draw([Panel("nothing", "tokens", bars, "no token")], tmp_path / "a.png")
    draw([Panel("some", "ms", [*bars, Bar("c", "vllm", 1e5), Bar("d", "ours", 1)])],
         tmp_path / "b.png")  # fmt: skip
    assert (tmp_path / "a.png").stat().st_size
    assert (tmp_path / "b.png").stat().st_size


def test_rates_count_every_token_of_whole_bins() -> None:
    arrivals = [[(-1.0, 1), (-0.6, 2), (0.1, 3)], [(0.49, 1), (5.0, 9)]]
    assert rates_in_bins(arrivals, -1.0, 0.5, 0.5) == ([-1.0, -0.5, 0.0], [6, 0, 8])


# ---- what the scripts count -----------------------------------------------------------


def test_recorded_arrivals_are_those_around_the_update() -> None:
    arrivals = [Arrival(at, 1, 0) for at in (1.0, 8.0, 10.5, 13.0, 20.0)]
    assert arrivals_around(arrivals, 10.0, 12.0, 2.0) == [(-2.0, 1), (0.5, 1), (3.0, 1)]


def test_silence_is_that_of_all_streams_and_may_begin_before_the_update() -> None:
    load = Load(2)
    load.streams[0].arrivals = [Arrival(at, 1, 0) for at in (0.0, 9.0, 14.0, 30.0)]
    load.streams[1].arrivals = [Arrival(at, 1, 0) for at in (8.0, 12.0, 14.5)]
    assert longest_silence(load, 10.0, 13.0) == 3.0


def test_request_that_waited_for_the_whole_window_counts_in_the_latency_only() -> None:
    answers = [Answered(0.0, 0.5), Answered(1.2, 1.4), Answered(0.9, 3.5), Answered(4.0, 4.5)]
    window = Window.of(answers, 1.0, 3.0, updates=1)
    assert window.rate == 0.5
    assert window.latency.high == pytest.approx(2600)
    assert window.latency.count == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [(0.3, 0.1, 3), (0.1, 0.0, math.inf), (0.1, -0.1, math.inf), (-0.1, 0.1, 0), (0.0, -0.1, 1)],
)
def test_cost_of_an_update_below_zero_meets_a_goal_that_a_cost_misses(
    ours: float, theirs: float, ratio: float
) -> None:
    assert over(ours, theirs) == pytest.approx(ratio)


def test_windows_of_one_kind_have_one_p95() -> None:
    steps = Steps()
    steps.add([0.1] * 90, 9.0)
    steps.add([0.2] * 10, 1.0)
    assert steps.p95 == pytest.approx(0.2)
    assert steps.rate == pytest.approx(10)


def test_unknown_way_is_measured() -> None:
    assert known_ways("value,disk") == ["value", "disk"]
    with pytest.raises(typer.BadParameter, match="'values'; there are disk, bucket, value"):
        known_ways("disk,values")


def test_server_without_steps_has_a_time_and_no_bar_of_steps() -> None:
    report = Report("small_tensors", (), {})
    with_steps, without = Found(idle_s=[1.0], cpu_us=[9.0]), Found(idle_s=[2.0], cpu_us=[9.0])
    with_steps.update_s.append(3.0)
    for steps, gap in (
        (with_steps.update, 0.3),
        (with_steps.still, 0.2),
        (with_steps.control, 0.4),
    ):
        steps.add([gap] * 20, 3.0)
    for server, found in (("ours", with_steps), ("upstream", without)):
        report.add(server=server, way="disk", **cells(found))
    p95, largest, seconds = PANELS["small_tensors"](
        [Result(FULL["small_tensors-20k"], RUN, report)]
    )
    (steps_bar,) = p95.bars
    assert steps_bar.server == "ours"
    assert (steps_bar.value, steps_bar.mark) == pytest.approx((1.5, 2))
    assert [bar.server for bar in largest.bars] == ["ours"]
    assert [(bar.server, bar.value) for bar in seconds.bars] == [("ours", 1), ("upstream", 2)]


def test_control_copies_less_than_the_checkpoint() -> None:
    sender = Sender(httpx.Client(), Path(), "ours", bytes_per_s=0, tell=lambda said: None)
    sender._copied = bytes(range(256)) * (COPIED_BYTES // 100)
    sender._copy = bytearray(len(sender._copied))
    assert len(sender._copied) > 2 * COPIED_BYTES
    half = len(sender._copy) // 2
    sender.copy_memory(0.0, 0.5)
    assert sender._copy == sender._copied[:half] + bytes(len(sender._copy) - half)
    done = sender.copy_memory(0.0, 1.0)
    assert sender._copy == sender._copied
    assert done.sent <= done.last_byte <= done.answered


def parts_report() -> Report:
    found = {
        (count, way): parts.Found([seconds], [1.0], [1.02], [1.01], [0.5], [1.5])
        for count, seconds_of in ((1, (3.0, 3.0, 4.0)), (4, (3.5, 6.0, 9.0)))
        for way, seconds in zip(get_args(Way), seconds_of, strict=True)
    }
    return parts.report_of(found, [1, 4], nbytes=300_000_000, bytes_per_s=1e8, carried=9.9e7)


def test_each_way_of_parts_has_the_limit_of_its_busiest_link() -> None:
    report = parts_report()
    a_bucket = BUCKET_BYTES / 1e8
    limits = {(row["servers"], row["way"]): row["wire_s"] for row in report.rows}
    assert limits[1, "relays"] == limits[1, "direct"] == 3
    assert limits[4, "relays"] == pytest.approx(3 + 3 * a_bucket)
    # two ranks send four copies
    assert limits[4, "direct"] == 6
    assert limits[1, "broadcast"] == limits[4, "broadcast"] == 4.5
    (panel,) = PANELS["parts"]([Result(FULL["parts"], RUN, report)])
    assert [bar.limit for bar in panel.bars] == [*limits.values()]


def test_further_server_is_counted_in_buckets() -> None:
    *_, added = parts_report().goals
    assert added.text.startswith("relays: what each further server adds")
    assert added.value == pytest.approx(0.5 / 3 / (BUCKET_BYTES / 1e8))
    assert added.is_met


def test_links_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    with pytest.raises(NoLinks, match="root"), links(1, 1e8):
        pass
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(NoLinks, match="ip and tc"), links(1, 1e8):
        pass


def test_prefills_are_counted_from_the_log() -> None:
    log = """
    [2030] Prefill batch, #new-seq: 2, #new-token: 128, #cached-token: 7, token usage: 0.01
    [2030] Decode batch, #running-req: 2, #token: 130
    [2030] Prefill batch [5], #new-seq: 1, #new-token: 64, #cached-token: 0
    """
    assert prefilled_by(log) == 192


# ---- the plan -----------------------------------------------------------------------


@pytest.mark.parametrize("is_quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("planned", PLAN, ids=lambda planned: planned.name)
def test_planned_options_are_those_of_the_script(planned: Any, is_quick: bool) -> None:
    if is_quick and planned.quick is None:
        return
    _, module, *options = planned.arguments(is_quick=is_quick)
    app = typer.Typer()
    app.command()(importlib.import_module(module).main)
    get_command(app).make_context(module, [*options, "--json", "file"])


def test_every_script_is_planned_described_drawn_and_in_the_readme() -> None:
    scripts = {
        file.stem
        for file in (ROOT / "benchmarks").glob("*.py")
        if "typer.run(main)" in file.read_text() and file.stem != "scale"
    }
    assert scripts == set(ABOUT) == {each.script for each in PLAN} == {*PANELS, TIMELINE}
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", readme, re.MULTILINE)) == scripts
    assert len({each.name for each in PLAN}) == len(PLAN)
    # the page puts runs of one script under one heading
    assert [each.script for each in PLAN] == sorted(
        (each.script for each in PLAN), key=list(ABOUT).index
    )


def test_only_takes_scripts_and_single_runs_and_names_unknown_ones() -> None:
    names = [each.name for each in chosen(["pause_grant", "update_gap-500m"], is_quick=False)]
    assert names == ["pause_grant-tp1", "pause_grant-tp2", "update_gap-500m"]
    assert len(chosen([], is_quick=True)) == sum(each.quick is not None for each in PLAN)
    with pytest.raises(ValueError, match="nosuch; there are changes, commit_size"):
        chosen(["nosuch"], is_quick=False)


def test_outcome_says_why_a_benchmark_has_no_result(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nRuntimeError: no server\nits log\n\n")
    assert outcome(0, log, has_result=True, limit_s=9)["state"] == "ran"
    assert outcome(None, log, has_result=False, limit_s=9)["why"] == "it had not ended after 9 s."
    for code in (0, 1):
        found = outcome(code, log, has_result=False, limit_s=9)
        assert found["state"] == "failed"
        assert f"status {code}: RuntimeError: no server" in found["why"]
    # a result of a script that failed later is not to be trusted
    assert outcome(1, log, has_result=True, limit_s=9)["state"] == "failed"


def test_absent_vllm_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert find_peers({}, tmp_path).left_out == {"vllm": "it has no environment."}
    (tmp_path / "log").write_text("WARNING: x\nERROR: No matching distribution found\n")
    peers = find_peers({}, tmp_path)
    assert "VLLM_PYTHON" not in peers.env
    assert peers.left_out["vllm"].endswith(
        "could not be made: ERROR: No matching distribution found"
    )


def test_vllm_that_a_quick_run_leaves_out_keeps_a_better_reason(tmp_path: Path) -> None:
    (tmp_path / ".ready").touch()
    without = find_peers({}, tmp_path).without_vllm("it is slow.")
    assert "VLLM_PYTHON" not in without.env
    assert (without.versions, without.left_out) == ({}, {"vllm": "it is slow."})
    (tmp_path / ".ready").unlink()
    absent = find_peers({}, tmp_path).without_vllm("it is slow.")
    assert absent.left_out == {"vllm": "it has no environment."}


def test_vllm_of_the_environment_that_make_has_made_is_used(tmp_path: Path) -> None:
    (tmp_path / ".ready").touch()
    peers = find_peers({"A": "b"}, tmp_path)
    assert peers.env["VLLM_PYTHON"] == str(tmp_path / "bin" / "python")
    assert (peers.env["A"], peers.left_out) == ("b", {})
    own = find_peers({"VLLM_PYTHON": "mine"}, tmp_path)
    assert own.env["VLLM_PYTHON"] == "mine"
