"""No kind of SGLang's servers starts without a word of what it lacks."""

from __future__ import annotations

import ast
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sglang
from sglang.srt.server_args import ServerArgs

from sglang_inflight import capabilities, inactive, plugin, unsupported

ARGUMENTS: Any = ServerArgs
# launches through ``Engine._launch_subprocesses``, which has a hook
HOOKED = {"sglang.srt.entrypoints.http_server", "sglang.srt.ray.http_server"}
SMG = "sglang.srt.entrypoints.grpc_server"


def test_each_launcher_of_sglang_is_known() -> None:
    source = Path(sglang.__path__[0], "launch_server.py").read_text(encoding="utf-8")
    (run,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "run_server"
    ]
    imported = {node.module for node in ast.walk(run) if isinstance(node, ast.ImportFrom)}
    assert imported == HOOKED | unsupported.OTHER_LAUNCHES.keys()


def test_plugin_waits_for_the_other_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: dict[str, Any] = {}
    for name in (
        "sglang_inflight.livepatch.apply_series",
        "sglang_inflight.frontend.engine.hooks.add_methods",
        "sglang_inflight.messages.make_known",
        "sglang_inflight.nccl_errors.name_error_handling",
    ):
        monkeypatch.setattr(name, lambda *_: None)
    monkeypatch.setattr(plugin, "_register", lambda hooks: None)
    monkeypatch.setattr(plugin, "_is_installed", False)
    monkeypatch.setattr("sglang_inflight.late_import.when_imported", waiting.__setitem__)
    plugin._install()
    assert waiting.items() >= unsupported.OTHER_LAUNCHES.items()


@pytest.mark.parametrize("name", [name for name in unsupported.OTHER_LAUNCHES if name != SMG])
def test_encoder_says_that_it_takes_no_update(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        unsupported.OTHER_LAUNCHES[name](ModuleType(name))
    assert capabilities.NO_ENCODER in caplog.text


def test_smg_is_refused_when_its_launcher_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_INFLIGHT_UNSUPPORTED", raising=False)
    with pytest.raises(unsupported.Unsupported, match="--smg-grpc-mode"):
        unsupported.OTHER_LAUNCHES[SMG](importlib.import_module(SMG))


def test_smg_starts_without_us_when_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_UNSUPPORTED", "off")
    monkeypatch.setattr(unsupported, "is_fork", lambda: False)
    try:
        with caplog.at_level(logging.WARNING):
            unsupported.OTHER_LAUNCHES[SMG](ModuleType(SMG))
        assert inactive.is_child_of_inactive()
        assert inactive.why_inactive() == unsupported.NO_SMG
        assert "runs as SGLang ships it" in caplog.text
    finally:
        inactive.begin(None)


def test_language_model_says_that_encoders_keep_their_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = ARGUMENTS(model_path="", language_only=True)
    with caplog.at_level(logging.WARNING):
        assert unsupported._decide_and_tell(None, args) is None
    assert capabilities.ENCODERS_ELSEWHERE in caplog.text
    assert capabilities.notes_on(ARGUMENTS(model_path="")) == []
