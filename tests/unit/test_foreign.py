"""Other distributions in SGLang's folder, and beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_inflight.cli import app
from sglang_inflight_tools import foreign

SGLANG = {
    "sglang/__init__.py": "",
    "sglang/version.py": "'0.5.23'",
    "sglang/srt/plugins.py": "load",
    "sglang/srt/scheduler.py": "run",
}
MILES = {"sglang/srt/scheduler.py": "run otherwise", "sglang/srt/miles.py": "", "megatron/a.py": ""}
ADAPTER = "verl/workers/rollout/sglang_rollout/http_server_engine.py"
SERVER = "verl/workers/rollout/sglang_rollout/async_sglang_server.py"


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Install files like pip, over the files of any other distribution."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{path},sha256={digest.decode()},{len(text)}")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def look(site: Path, patched: frozenset[str] = frozenset()) -> foreign.Foreign:
    return foreign.look(distributions(path=[str(site)]), patched)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "sglang", "0.5.23", SGLANG)
    return tmp_path


def test_untouched_sglang_has_no_findings(site: Path) -> None:
    install(site, "sglang-router", "0.3", {"sglang_router/__init__.py": ""})
    assert look(site) == foreign.Foreign()


def test_distribution_overwriting_sglang_is_a_problem(site: Path) -> None:
    install(site, "miles-rl", "0.0.2", MILES)
    found = look(site)
    (problem,) = found.problems
    assert problem.startswith("foreign sglang: miles-rl 0.0.2 has overwritten 1 file ")
    assert "put 1 file beside" in problem
    assert "sglang/srt/scheduler.py" in problem
    assert found.notes == []


def test_leftover_files_beside_sglang_are_a_problem(site: Path) -> None:
    """SGLang was reinstalled, and extra files of the other distribution remain."""
    install(site, "miles-rl", "0.0.2", MILES)
    for path, text in SGLANG.items():
        (site / path).write_text(text)
    (problem,) = look(site).problems
    assert "has overwritten 0 files" in problem
    assert "sglang/srt/miles.py" in problem
    (site / "sglang/srt/miles.py").unlink()
    assert look(site) == foreign.Foreign()


def test_edited_sglang_file_is_a_note(site: Path) -> None:
    """An edit alone is no problem, and a fork's patched files are no edits."""
    for path in ("sglang/version.py", "sglang/srt/scheduler.py"):
        (site / path).write_text("edited")
    found = look(site, patched=frozenset({"sglang/srt/scheduler.py"}))
    (note,) = found.notes
    assert "1 file of sglang 0.5.23 is not as it was installed (sglang/version.py)" in note
    assert found.problems == []


def test_editable_sglang_has_no_findings(site: Path) -> None:
    """An editable install has no record."""
    (site / "sglang-0.5.23.dist-info" / "RECORD").unlink()
    (site / "sglang/version.py").write_text("edited")
    assert look(site) == foreign.Foreign()


VERL = {
    ADAPTER: "class HttpServerAdapter(EngineBase):\n    def generate(self): ...",
    SERVER: "names = [f.name for f in dataclasses.fields(ServerArgs)]",
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["begin_weight_update", "dataclasses.fields(ServerArgs)"]),
        ({SERVER: "names = ()"}, ["begin_weight_update"]),
        ({ADAPTER: VERL[ADAPTER] + "\n    def begin_weight_update(self): ..."}, ["dataclasses"]),
    ],
    ids=["0.9.1", "the adapter alone", "the server alone"],
)
def test_incompatible_verl_is_a_note(site: Path, changes: dict[str, str], said: list[str]) -> None:
    install(site, "verl", "0.9.1", VERL | changes)
    found = look(site)
    (note,) = found.notes
    assert note.startswith("verl 0.9.1 does not start its servers")
    assert note.count("sglang_rollout/") == len(said)
    assert all(word in note for word in said)
    assert found.problems == []


def test_compatible_verl_has_no_findings(site: Path) -> None:
    install(site, "verl", "1.0", {ADAPTER: "class HttpServerAdapter: ...", SERVER: ""})
    assert look(site) == foreign.Foreign()


def test_doctor_prints_problems_and_notes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "miles-rl", "0.0.2", MILES)
    install(site, "verl", "0.9.1", VERL)
    found = look(site)
    monkeypatch.setattr(foreign, "look", lambda **_: found)
    seen = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(seen.stdout)
    assert (seen.exit_code, report["problems"], report["notes"]) == (1, found.problems, found.notes)
    words = CliRunner().invoke(app, ["doctor"]).stdout
    assert all(sentence in words for sentence in (*found.problems, *found.notes))
