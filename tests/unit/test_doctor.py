"""The doctor finds all that would stop a server, and changes nothing."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
from collections.abc import Iterator
from importlib.metadata import EntryPoints
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from harness.marker import CONFIG
from harness.starting import forked_children
from sglang_inflight import hooking, unsupported
from sglang_inflight.cli import app, local
from sglang_inflight.plugin import hook_modules
from sglang_inflight.scheduler.update import cost
from sglang_inflight_tools import doctor, flags, foreign
from sglang_inflight_tools.tried_flags import DECIDING, TRIED
from tests.support import tried_flags

SERIES = sorted((Path(__file__).parents[2] / "patches").glob("sglang-*"))


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Parse flags in a forked process. ``tests/test_plugin_start.py`` runs a doctor of its own."""
    # preparing a server in this process would affect all later tests
    with patch.dict(os.environ), forked_children():
        yield


@functools.cache
def others(patched: frozenset[str]) -> foreign.Foreign:
    return foreign.look(patched=patched)


@pytest.fixture(autouse=True)
def looked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the files of all distributions once, not in each test."""
    once = SimpleNamespace(look=lambda patched: others(frozenset(patched)))
    monkeypatch.setattr(doctor, "foreign", once)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_doctor_checks_every_hook() -> None:
    report = doctor.report()
    assert report.healthy, report.problems
    # without Ray, SGLang's launchers on Ray are neither imported nor hooked
    modules = hook_modules(without=() if find_spec("ray") else {"ray"})
    assert [(hook.target, hook.kind) for hook in report.hooks] == [
        (target, kind.name) for target, _, kind in hooking.hooks_of(modules)
    ]


@pytest.mark.parametrize(
    ("module", "target", "reason"),
    [
        ("scheduler.hold", "sglang.srt.managers.scheduler.Scheduler.run_bach", "run_bach"),
        ("frontend.spans", "sglang.srt.no_such_module.TokenizerManager.run", "no_such_module"),
        ("frontend.engine.hooks", "sglang.version.__version__", "it is a str"),
    ],
)
def test_unresolvable_hook_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, module: str, target: str, reason: str
) -> None:
    name = f"sglang_inflight.{module}"
    (_, hook, kind), *_ = hooking.hooks_of([name])
    monkeypatch.setitem(hooking._declared, name, [(0, hooking.Hook(target, hook, kind))])
    seen = CliRunner().invoke(app, ["doctor", "--json"])
    (problem,) = json.loads(seen.stdout)["problems"]
    assert (seen.exit_code, target in problem, reason in problem) == (1, True, True)


def test_doctor_lists_every_refusal_at_start() -> None:
    tree = ast.parse(inspect.getsource(unsupported.why_not))
    returned = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
        if node.value.id.isupper()
    }
    assert returned
    assert {getattr(unsupported, name) for name in returned} == set(unsupported.AT_START)
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["refused"]
    assert told == list(unsupported.AT_START)


REFUSED = ["--disaggregation-mode", "decode", "--enable-pd-role-switch"]


def test_doctor_refuses_unsupported_flags(model: Path) -> None:
    flags = ["--model-path", str(model)]
    refused = doctor._Flags(why_inactive=unsupported.NO_ROLE_SWITCH)
    assert doctor._look_at_flags([*flags, *REFUSED]) == refused
    (refusal,), *others = doctor._look_at_flags([*flags, "--no-such-flag"])
    assert ("--no-such-flag" in refusal, others) == (True, [None, None, None, ()])


@pytest.mark.parametrize("flag", ["--smg-grpc-mode", "--grpc-mode"])
def test_doctor_refuses_a_server_without_our_front_end(model: Path, flag: str) -> None:
    refused = doctor._Flags(why_inactive=unsupported.NO_SMG)
    assert doctor._look_at_flags(["--model-path", str(model), flag]) == refused


def test_doctor_accepts_help_flag(model: Path) -> None:
    """SGLang exits without a word on stderr, and refuses nothing."""
    assert doctor._look_at_flags(["--help"]) == doctor._Flags()


def test_doctor_prints_verdict_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> list[str]:
        return CliRunner().invoke(app, ["doctor"]).stdout.strip().splitlines()

    seen = ask()
    assert seen[-1] == "A server would start here."
    assert "a server is refused if it asks for" in {line.strip() for line in seen}
    monkeypatch.setattr("sglang_inflight.livepatch.series.version", lambda distribution: "0.1")
    assert ask()[-1] == "A server would not start here."


def test_doctor_checks_local_control_broadcast(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted if the ranks meet before each forward and none can be absent."""
    flags = ["--model-path", str(model), "--tp-size", "2", "--attn-dp-size", "2"]
    flags += ["--enable-dp-attention-local-control-broadcast"]
    assert doctor._look_at_flags(flags).can is not None
    refused = doctor._Flags(why_inactive=unsupported.NO_LOCAL_BROADCAST)
    assert doctor._look_at_flags([*flags, "--pp-size", "2"]) == refused
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    assert doctor._look_at_flags(flags) == refused


@pytest.mark.parametrize(
    ("setting", "exit_code", "told_as"), [("refuse", 1, "problems"), ("off", 0, "inactive")]
)
def test_unsupported_flags_follow_setting(
    monkeypatch: pytest.MonkeyPatch, model: Path, setting: str, exit_code: int, told_as: str
) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_UNSUPPORTED", setting)
    words = ["doctor", "--json", "--", "--model-path", str(model), *REFUSED]
    seen = CliRunner().invoke(app, words)
    report = json.loads(seen.stdout)
    (sentence,) = report["problems"] + report["inactive"]
    assert (seen.exit_code, report[told_as]) == (exit_code, [sentence])
    assert sentence.startswith(unsupported.NO_ROLE_SWITCH)


def test_unsupported_version_is_inactive_when_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_UNSUPPORTED", "off")
    monkeypatch.setattr("sglang_inflight.livepatch.series.version", lambda distribution: "0.1")
    report = doctor.report()
    (sentence,) = report.inactive
    assert (report.problems, "sglang 0.1" in sentence) == ([], True)


def test_command_without_the_tools_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "entry_points", lambda **_: EntryPoints())
    seen = CliRunner().invoke(app, ["doctor", "--json", "--", "--model-path", "m"])
    assert seen.exit_code == 2
    assert "sglang-inflight-tools, which is not installed" in seen.stderr


def test_sglang_plugins_without_us_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another, inflight_reference")
    report = doctor.report()
    assert report.inactive == [
        "SGLANG_PLUGINS=another, inflight_reference leaves out inflight: a server runs as SGLang "
        "ships it"
    ]
    assert report.healthy


def test_doctor_accepts_supported_flags(model: Path) -> None:
    """The check leaves this process unchanged."""
    before = dict(os.environ)
    words = ["doctor", "--", "--model-path", str(model), "--skip-tokenizer-init"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert dict(os.environ) == before


def test_doctor_says_what_a_server_with_these_flags_cannot_do(model: Path) -> None:
    flags = ["--model-path", str(model), "--disaggregation-mode", "prefill"]
    said = doctor.report(flags).capabilities
    assert said is not None
    assert said["pause"] is None
    assert "--disaggregation-mode" in (said["recompute"] or "")
    assert doctor.report().capabilities is None


def test_table_of_tried_flags_is_what_the_tests_use() -> None:
    written, wanted = tried_flags.FILE.read_text(), tried_flags.write()
    assert ast.unparse(ast.parse(written)) == ast.unparse(ast.parse(wanted)), (
        f"run python -m {tried_flags.__name__}"
    )


def test_every_row_of_the_tables_of_flags_is_an_argument_of_sglang() -> None:
    assert {*flags.arguments().values()} >= TRIED | DECIDING | flags.WITHOUT_EFFECT
    assert not flags.WITHOUT_EFFECT & (TRIED | DECIDING)


def test_doctor_says_of_each_flag_whether_it_was_tried(model: Path) -> None:
    given = ["--model-path", str(model), "--tp=2", "--pp-size", "2", "--log-requests-form", "text"]
    given += ["--enable-two-batch-overlap", "--no-such-flag"]
    seen = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--", *given]).stdout)
    assert seen["flags"] == {
        "--model-path": flags.TESTED,
        "--tp": flags.TESTED,
        "--pp-size": f"{flags.TESTED}, and {flags.DECIDES}",
        "--log-requests-form": flags.NO_EFFECT,
        "--enable-two-batch-overlap": flags.UNTRIED,
    }
    assert [note for note in seen["notes"] if flags.UNTRIED in note] == [
        "--enable-two-batch-overlap: nothing of ours was tried with it"
    ]


def test_failed_estimate_is_no_problem_of_the_server(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    def fail(server_args: object) -> dict[str, int]:
        raise ValueError("no heads")

    monkeypatch.setattr(cost, "estimate", fail)
    found = doctor._look_at_flags(["--model-path", str(model)])
    assert found.can is not None
    assert list(found.refusals) == []
    (note,) = found.notes
    assert "no heads" in note


def test_doctor_lists_supported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_inflight.livepatch.series.version", lambda distribution: "0.1")
    seen = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(seen.stdout)
    supported = [folder.name.removeprefix("sglang-") for folder in SERIES]
    assert (seen.exit_code, report["supported"]) == (1, supported)
    assert any(" or ".join(supported) in problem for problem in report["problems"])
