"""The doctor sees what would stop a server, and leaves everything as it was."""

from __future__ import annotations

import ast
import inspect
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.marker import CONFIG
from sglang_inflight import doctor, unsupported
from sglang_inflight.cli import app
from sglang_inflight.frontend import tokenizer_hooks
from sglang_inflight.frontend.engine import hooks as engine_hooks
from sglang_inflight.scheduler import hooks as scheduler_hooks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_hook_is_looked_for() -> None:
    report = doctor.report()
    assert report.healthy, report.problems
    assert [(hook.target, hook.kind) for hook in report.hooks] == [
        (target, kind.name)
        for target, _, kind in (
            *scheduler_hooks.HOOKS,
            *tokenizer_hooks.HOOKS,
            *engine_hooks.HOOKS,
        )
    ]


@pytest.mark.parametrize(
    ("hooks", "target", "reason"),
    [
        (scheduler_hooks, "sglang.srt.managers.scheduler.Scheduler.run_bach", "run_bach"),
        (tokenizer_hooks, "sglang.srt.no_such_module.TokenizerManager.run", "no_such_module"),
        (engine_hooks, "sglang.version.__version__", "it is a str"),
    ],
)
def test_hook_that_sglang_cannot_put_in_place(
    monkeypatch: pytest.MonkeyPatch, hooks: object, target: str, reason: str
) -> None:
    (_, hook, kind), *_ = hooks.HOOKS  # type: ignore[attr-defined]
    monkeypatch.setattr(hooks, "HOOKS", [(target, hook, kind)])
    seen = CliRunner().invoke(app, ["doctor", "--json"])
    (problem,) = json.loads(seen.stdout)["problems"]
    assert (seen.exit_code, target in problem, reason in problem) == (1, True, True)


def test_all_that_is_refused_at_start_is_told() -> None:
    tree = ast.parse(inspect.getsource(unsupported.refuse_at_start))
    raised = {
        ast.unparse(node.exc.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    assert raised
    assert {getattr(unsupported, name) for name in raised} == set(unsupported.AT_START)
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["refused"]
    assert told == list(unsupported.AT_START)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--nnodes", "2"], unsupported.ONE_NODE), (["--no-such-flag"], "--no-such-flag")],
)
def test_server_flags_that_would_be_refused(model: Path, flags: list[str], sentence: str) -> None:
    (refusal,) = doctor._refusals(["--model-path", str(model), *flags])
    assert sentence in refusal


def test_server_flags_that_would_be_taken(model: Path) -> None:
    """To ask leaves this process as it was."""
    before = dict(os.environ)
    words = ["doctor", "--", "--model-path", str(model), "--skip-tokenizer-init"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert dict(os.environ) == before
