"""Predict whether a server would start here, with or without us, without starting one."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import multiprocessing
import pkgutil
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sglang_inflight.extension import all_extensions
from sglang_inflight.livepatch import (
    AppliedFunction,
    PatchRefused,
    installed_root,
    load_series,
    supported_versions,
)
from sglang_inflight.plugin import hook_modules
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight_tools import foreign
from sglang_inflight_tools.flags import UNTRIED, look
from sglang_inflight_tools.parameters import Parameters
from sglang_inflight_tools.source_tree import SourceTree
from sglang_inflight_tools.targets import why_not_hooked as why_not_by_source

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import ServerArgs


@dataclass(frozen=True)
class HookedFunction:
    """A hook. ``reason`` says why it cannot be installed, and is None if it can."""

    target: str
    kind: str
    reason: str | None


@dataclass(frozen=True)
class Report:
    """The doctor's findings. A list of texts has a sentence for each finding.

    ``problems``: reasons why a server would not start.
    ``inactive``: reasons why it would run as SGLang ships it
    (``SGLANG_INFLIGHT_UNSUPPORTED=off``).
    ``refused``: all unsupported server arguments, given here or not.
    ``notes``: facts worth knowing, harmless to a start.
    ``supported``: supported versions of SGLang.
    ``on_cpu``: choices of the reference platform, empty on others.
    ``kv_tokens``: about how many tokens of KV have the size of the memory that each form of staging
    keeps (``scheduler/update/cost.py``); empty without flags or a checkpoint on this machine.
    ``flags``: what is known of each given flag beside us (``flags.py``).
    ``capabilities``: what a server with the given flags can do, as far as they tell; None without
    flags, or if the server would not start with us.
    """

    versions: dict[str, str]
    supported: list[str]
    series: str | None
    already_applied: bool
    functions: list[AppliedFunction]
    hooks: list[HookedFunction]
    platform: str | None
    on_cpu: dict[str, str]
    settings: dict[str, Any]
    refused: list[str]
    flags: dict[str, str]
    capabilities: dict[str, str | None] | None
    kv_tokens: dict[str, int]
    inactive: list[str]
    problems: list[str]
    notes: list[str]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


class _Flags(NamedTuple):
    """The findings about a server from its flags.

    ``refusals``: why ``sglang serve`` refuses them. ``why_inactive``: why the server cannot run
    with us. ``can``: what it can do, None if one of the others says that it would not run.
    """

    refusals: Sequence[str] = ()
    why_inactive: str | None = None
    can: Capabilities | None = None
    kv_tokens: dict[str, int] | None = None
    notes: Sequence[str] = ()


def report(server_flags: Sequence[str] = ()) -> Report:
    """Examine this installation and, if given, a server with the flags of ``sglang serve``."""
    problems: list[str] = []
    inactive: list[str] = []
    settings = _settings(problems)
    # the list for the refusals of a launch
    unsupported = inactive if settings.get("unsupported") == "off" else problems
    series, already_applied, functions = None, False, list[AppliedFunction]()
    try:
        loaded = load_series()
        series = loaded.name
        plan = loaded.plan()
        already_applied, functions = plan.already_applied, plan.functions
    except PatchRefused as refusal:
        unsupported.append(str(refusal))
    chosen = _platform(problems)
    others = foreign.look(patched={f.file for f in functions if f.in_fork})
    problems += others.problems
    # an inactive server installs no hooks, so their problems do not count
    looked_for = [] if inactive else problems
    _left_out(inactive)
    flags, known = _Flags(), dict[str, str]()
    if server_flags:
        # a process of its own: SGLang changes its environment while it reads flags
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
            flags = elsewhere.submit(_look_at_flags, server_flags).result()
            known = elsewhere.submit(look, server_flags).result()
    found = Report(
        versions=_versions(),
        supported=supported_versions(),
        series=series,
        already_applied=already_applied,
        functions=functions,
        hooks=_hooks(looked_for),
        platform=chosen,
        on_cpu=_on_cpu(chosen),
        settings=settings,
        refused=_refused(problems),
        flags=known,
        capabilities=flags.can.as_json() if flags.can is not None else None,
        kv_tokens=flags.kv_tokens or {},
        inactive=inactive,
        problems=problems,
        notes=[
            *others.notes,
            *flags.notes,
            *(f"{flag}: {UNTRIED}" for flag, word in known.items() if word == UNTRIED),
        ],
    )
    problems += flags.refusals
    if (why := flags.why_inactive) is not None:
        from sglang_inflight.unsupported import why_refused

        stops = why_refused(why, off=unsupported is inactive, in_fork=already_applied)
        (problems if stops else inactive).append(stops or why)
    return found


def _left_out(inactive: list[str]) -> None:
    """Report that SGLang would not load our plugin. SGLang's log does not name what it leaves."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP

    (plugin,) = distribution("sglang-inflight").entry_points.select(group=GENERAL_PLUGINS_GROUP)
    allowed = envs.SGLANG_PLUGINS.get()
    if allowed and plugin.name not in {name.strip() for name in allowed.split(",")}:
        inactive.append(
            f"SGLANG_PLUGINS={allowed} leaves out {plugin.name}: a server runs as SGLang ships it"
        )


def _hooks(problems: list[str]) -> list[HookedFunction]:
    """Return every hook, with the reason if SGLang lacks its target.

    SGLang's registry would only log a missing target.
    """
    from sglang_inflight.hooking import hooks_of

    importable: list[str] = []
    libraries = {each.library for each in all_extensions() if each.library is not None}
    for name in hook_modules(without={each for each in libraries if find_spec(each) is None}):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            problems.append(f"{name} cannot be imported: {error!r}")
        else:
            importable.append(name)
    hooks = [
        HookedFunction(target, kind.name, why_not_hooked(target, hook, kind.name))
        for target, hook, kind in hooks_of(importable)
    ]
    problems += [
        f"SGLang cannot hook {hook.target}: {hook.reason}" for hook in hooks if hook.reason
    ]
    return hooks


def why_not_hooked(target: str, hook: Callable[..., Any], kind: str) -> str | None:
    """Return why ``hook`` cannot be installed, or None.

    Resolves ``target`` as SGLang's registry does, and reads its parameters in the source.
    """
    owner, _, name = target.rpartition(".")
    try:
        function = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(function, staticmethod | classmethod):
        function = function.__func__
    if not callable(function):
        return f"it is a {type(function).__name__}"
    return why_not_by_source(_installed(), target, Parameters.of_function(hook), kind)


@functools.cache
def _installed() -> SourceTree:
    return SourceTree(installed_root("sglang"))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("sglang-inflight", "sglang", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _platform(problems: list[str]) -> str | None:
    """Return the class chosen by SGLang. The choice runs platform plugins, and any may raise."""
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
        settings = importlib.import_module("sglang_inflight.settings")
        found: dict[str, Any] = {}
        for kind in settings.kinds():
            found |= asdict(settings.read(kind))
        return found
    except SystemExit as error:
        problems.append(str(error))
        return {}


def _on_cpu(chosen: str | None) -> dict[str, str]:
    """Return the reference platform's default choices, with reasons."""
    if chosen != "sglang_inflight_tools.platform.ReferencePlatform":
        return {}
    from sglang_inflight_tools import cpu
    from sglang_inflight_tools.platform import describe_threads

    dtype, why = cpu.fast_dtype()
    return {"dtype": f"{dtype}: {why}", "threads": describe_threads()}


def _refused(problems: list[str]) -> list[str]:
    try:
        return list(importlib.import_module("sglang_inflight.unsupported").AT_START)
    except Exception as error:
        problems.append(f"sglang_inflight.unsupported cannot be imported: {error!r}")
        return []


def _look_at_flags(server_flags: Sequence[str]) -> _Flags:
    said = io.StringIO()
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
        from sglang.srt.server_args import prepare_server_args

        from sglang_inflight import capabilities
        from sglang_inflight.unsupported import why_not

        with redirect_stderr(said):
            server_args = cast("ServerArgs", prepare_server_args(list(server_flags)))
        if (why := why_not(server_args)) is not None:
            return _Flags(why_inactive=why)
        can = capabilities.with_store(
            capabilities.of(server_args), cast("ServerArgs", resolved_view(server_args))
        )
    except SystemExit as refusal:
        code = refusal.code
        if not code:
            # --help ends with code 0
            return _Flags()
        if isinstance(code, str):
            return _Flags([code])
        # argparse prints the reason on stderr, and exits with a number
        lines = said.getvalue().splitlines() or [f"SGLang refuses these flags: exit code {code}"]
        return _Flags(lines[-1:])
    except Exception as error:
        return _Flags([f"SGLang refuses these flags: {error}"])
    notes = capabilities.notes_on(server_args)
    if can.stage == capabilities.NO_ENCODER:
        return _Flags(can=can, notes=notes)
    return _with_cost(_Flags(can=can, notes=notes), server_args)


def _with_cost(flags: _Flags, server_args: ServerArgs) -> _Flags:
    """Return ``flags`` with what staging costs, or with a note of why that is not known."""
    from sglang_inflight.scheduler.update import cost

    try:
        return flags._replace(kv_tokens=cost.estimate(server_args))
    except Exception as error:
        why = f"the cost of staging could not be estimated: {error!r}"
        return flags._replace(notes=[*flags.notes, why])
