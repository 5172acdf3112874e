"""Would a server start here, and as what? Looked at without starting or changing one."""

from __future__ import annotations

import importlib
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from sglang_inflight.livepatch import AppliedFunction, PatchRefused, load_series


@dataclass(frozen=True)
class Report:
    """``problems`` holds a sentence for everything that would stop a server."""

    versions: dict[str, str]
    series: str | None
    already_applied: bool
    functions: list[AppliedFunction]
    platform: str | None
    settings: dict[str, Any]
    problems: list[str]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def report() -> Report:
    problems: list[str] = []
    series, already_applied, functions = None, False, list[AppliedFunction]()
    try:
        loaded = load_series()
        series = loaded.name
        plan = loaded.plan()
        already_applied, functions = plan.already_applied, plan.functions
    except PatchRefused as refusal:
        problems.append(str(refusal))
    return Report(
        versions=_versions(),
        series=series,
        already_applied=already_applied,
        functions=functions,
        platform=_platform(problems),
        settings=_settings(problems),
        problems=problems,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for distribution in ("sglang-inflight", "sglang", "torch"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "not installed"
    return found


def _platform(problems: list[str]) -> str | None:
    """The class SGLang chooses. Choosing activates platform plugins, which may fail anyhow."""
    try:
        chosen = importlib.import_module("sglang.srt.platforms").current_platform
    except Exception as error:
        problems.append(f"SGLang finds no platform: {error}")
        return None
    return f"{type(chosen).__module__}.{type(chosen).__qualname__}"


def _settings(problems: list[str]) -> dict[str, Any]:
    if find_spec("sglang_inflight.settings") is None:
        return {}
    try:
        settings = importlib.import_module("sglang_inflight.settings").Settings
        return asdict(settings.from_environment())
    except SystemExit as error:
        problems.append(str(error))
        return {}
