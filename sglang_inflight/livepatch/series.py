"""A series of patches: read it, check it against the installed package, apply it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from sglang_inflight.livepatch import exact, hooks
from sglang_inflight.livepatch.exact import FileDiff, Line
from sglang_inflight.livepatch.functions import (
    BeyondBodies,
    ChangedFunction,
    Module,
    build,
    changed_functions,
    compiled,
    function_at,
    show_in_tracebacks,
)
from sglang_inflight.livepatch.hooks import PatchRefused

logger = logging.getLogger(__name__)

# a wheel has the repository's patches/ as sglang_inflight/_patches
_HOUSE = Path(__file__).parent.parent
_PATCHES = (_HOUSE / "_patches", _HOUSE.parent / "patches")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable garbage collection: parsed trees are no garbage, and it takes half a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Patch:
    name: str
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True)
class AppliedFunction:
    """A patched function. ``in_fork``: the installed source is patched already."""

    target: str
    file: str
    patches: tuple[str, ...]
    in_fork: bool

    @property
    def qualname(self) -> str:
        return self.target.removeprefix(_module_name(self.file) + ".")


@dataclass(frozen=True)
class PatchedModule:
    """One module with the whole series applied."""

    file: str
    path: Path
    text: str
    module: Module
    changes: tuple[tuple[ChangedFunction, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        return _module_name(self.file)

    @property
    def filename(self) -> str:
        """Name of the patched functions' source in tracebacks."""
        return f"<sglang_inflight patched>/{self.file}"

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)


@dataclass(frozen=True)
class Plan:
    """The series' changes to the installed package, not applied yet."""

    modules: tuple[PatchedModule, ...]
    already_applied: bool

    @property
    def functions(self) -> list[AppliedFunction]:
        return [
            AppliedFunction(
                f"{module.name}.{function.qualname}", module.file, patches, self.already_applied
            )
            for module in self.modules
            for function, patches in module.changes
        ]


@dataclass(frozen=True)
class Series:
    """The patches for one version of one package, in order."""

    distribution: str
    version: str
    folder: Path
    patches: tuple[Patch, ...]
    # parent folder of the package, if it is not the installed one
    elsewhere: Path | None = None

    def within(self, root: Path) -> Series:
        """Return the same patches for the package in ``root``."""
        return replace(self, elsewhere=root)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def found(self) -> str:
        return f"{self.distribution} {self.version}"

    @cached_property
    def root(self) -> Path:
        """Parent folder of the package."""
        if self.elsewhere is not None:
            return self.elsewhere
        return installed_root(self.distribution)

    @_collector_paused()
    def plan(self) -> Plan:
        """Compute the changes. Raises ``PatchRefused`` if the series does not fit exactly."""
        installed = {file: exact.lines_of(self._read(file, patch)) for patch, file in self._reach()}
        try:
            original, patched = installed, self._forward(installed)
            already_applied = False
        except PatchRefused as refusal:
            reverted = self._revert(installed)
            if reverted is None:
                self._refuse_partly_patched(installed)
                raise refusal from None
            original, patched = reverted, self._forward(reverted)
            already_applied = True
        modules = tuple(self._compare(f, original[f], patched[f]) for f in installed)
        self._refuse_idle_patches(modules)
        return Plan(modules, already_applied)

    @_collector_paused()
    def apply(self) -> list[AppliedFunction]:
        """Register the series. ``HookRegistry.apply_hooks`` then applies and verifies it."""
        plan = self.plan()
        hooks.install(
            [
                self._replacement(patched, change, patches, plan.already_applied)
                for patched in plan.modules
                for change, patches in patched.changes
            ]
        )
        return plan.functions

    def _replacement(
        self,
        patched: PatchedModule,
        change: ChangedFunction,
        patches: tuple[str, ...],
        in_fork: bool,
    ) -> hooks.Replacement:
        target = f"{patched.name}.{change.qualname}"
        try:
            module = importlib.import_module(patched.name)
            owner: Any = module
            for outer in change.classes:
                owner = vars(owner)[outer.name]
            if in_fork:
                return hooks.Replacement(target, owner, None, patches, self.found)
            show_in_tracebacks(patched.filename, patched.text, patched.lines)
            code = compiled(change, patched.module.tree, patched.filename)
            built = build(change, code, module, owner)
        except Exception as error:
            reason = f"cannot be compiled in its module: {error!r}"
            raise self._refused(reason, _names(patches), target) from error
        function = hooks.callable_of(built)
        if function is None:
            reason = f"SGLang cannot hook a {type(built).__name__}"
            raise self._refused(reason, _names(patches), target)
        return hooks.Replacement(target, owner, function, patches, self.found)

    def _reach(self) -> Iterator[tuple[str, str]]:
        for patch in self.patches:
            for diff in patch.diffs:
                yield patch.name, diff.file

    def _read(self, file: str, patch: str) -> str:
        try:
            return (self.root / file).read_bytes().decode()
        except OSError as error:
            raise self._refused(f"{file} cannot be read: {error.strerror}", patch) from error

    def _forward(self, sources: dict[str, list[Line]]) -> dict[str, list[Line]]:
        texts = dict(sources)
        for patch in self.patches:
            for diff in patch.diffs:
                try:
                    texts[diff.file] = exact.apply(texts[diff.file], diff, patch.name)
                except exact.Mismatch as mismatch:
                    function = function_at(exact.text_of(texts[diff.file]), mismatch.line)
                    raise self._refused(
                        f"{diff.file}: {mismatch}", patch.name, function
                    ) from mismatch
        return texts

    def _revert(self, sources: dict[str, list[Line]]) -> dict[str, list[Line]] | None:
        texts = dict(sources)
        try:
            for patch in reversed(self.patches):
                for diff in reversed(patch.diffs):
                    texts[diff.file] = exact.apply(texts[diff.file], diff.reversed(), patch.name)
        except exact.Mismatch:
            return None
        return {file: [Line(line.text) for line in lines] for file, lines in texts.items()}

    def _refuse_partly_patched(self, installed: dict[str, list[Line]]) -> None:
        """Raise ``PatchRefused`` if some patches, but not all, are in the installed source."""
        inside, outside = [], []
        for patch in self.patches:
            for diff in patch.diffs:
                try:
                    exact.apply(installed[diff.file], diff.reversed(), patch.name)
                    inside.append(patch.name)
                except exact.Mismatch:
                    outside.append(patch.name)
        if inside:
            raise self._refused(
                f"the installed source is partly patched: it has {_names(inside)}, "
                f"but not {_names(outside)} as in the series",
                outside[0] if outside else inside[0],
            )

    def _compare(
        self, file: str, original: Sequence[Line], patched: Sequence[Line]
    ) -> PatchedModule:
        touching = _names([p.name for p in self.patches if any(d.file == file for d in p.diffs)])
        text = exact.text_of(patched)
        try:
            after = Module.parse(text, file)
            before = Module.parse(exact.text_of(original), file)
            functions = changed_functions(before, after)
        except SyntaxError as error:
            raise self._refused(
                f"{file} is not valid Python after it: {error}",
                _patch_near(patched, error.lineno, touching),
            ) from error
        except BeyondBodies as error:
            raise self._refused(
                f"{file}, {error}",
                _patch_near(patched, error.line, touching),
                function_at(text, error.line),
            ) from error
        changes = tuple(
            (function, _patches_in(patched[function.first_line - 1 : function.last_line]))
            for function in functions
        )
        return PatchedModule(file, self.root / file, text, after, changes)

    def _refuse_idle_patches(self, modules: Sequence[PatchedModule]) -> None:
        working = {name for module in modules for _, patches in module.changes for name in patches}
        for patch in self.patches:
            if patch.name not in working:
                raise self._refused("changes no function", patch.name)

    def _refused(
        self, reason: str, patch: str | None = None, function: str | None = None
    ) -> PatchRefused:
        return PatchRefused(reason, found=self.found, patch=patch, function=function)


def supported_versions(distribution: str = "sglang", patches: Path | None = None) -> list[str]:
    """Return the versions with a series, oldest first."""
    prefix = f"{distribution}-"
    folders = (place.name for place in _house(patches).glob(f"{prefix}*"))
    return sorted((name.removeprefix(prefix) for name in folders), key=Version)


def _house(patches: Path | None) -> Path:
    return patches or next((place for place in _PATCHES if place.is_dir()), _PATCHES[0])


def installed_root(distribution: str) -> Path:
    """Return the parent folder of the installed package, without importing it."""
    spec = importlib.util.find_spec(distribution)
    if spec is None or spec.origin is None:
        raise PatchRefused("its package cannot be found", found=distribution)
    return Path(spec.origin).parent.parent


def load_series(distribution: str = "sglang", patches: Path | None = None) -> Series:
    """Read the series for the installed version of ``distribution``, below ``patches``."""
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        raise PatchRefused(
            "it is not installed", found=f"a machine without {distribution}"
        ) from None
    return read_series(installed, distribution, patches)


def read_series(version: str, distribution: str = "sglang", patches: Path | None = None) -> Series:
    """Read the series for ``version``, installed or not."""
    found = f"{distribution} {version}"
    folder = _house(patches) / f"{distribution}-{version}"
    if not folder.is_dir():
        there = supported_versions(distribution, patches)
        raise PatchRefused(
            f"the patches are for {distribution} {' or '.join(there) or 'of no version'}",
            found=found,
        )
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchRefused(f"{folder.name} holds no patch", found=found)
    return Series(distribution, version, folder, tuple(_read_patch(f, found) for f in files))


def apply_series() -> list[AppliedFunction]:
    """Apply the series for the installed SGLang. Any failure raises ``PatchRefused``."""
    try:
        try:
            applied = load_series().apply()
        except Exception as error:
            raise PatchRefused(repr(error), found=f"sglang {version('sglang')}") from error
    except PatchRefused as refusal:
        logger.critical("%s", refusal)
        raise
    for function in applied:
        logger.info(
            "%s %s (%s)",
            "Already patched (fork):" if function.in_fork else "Patched in memory:",
            function.target,
            _names(function.patches),
        )
    return applied


def write_fork(destination: Path, series: Series | None = None) -> list[AppliedFunction]:
    """Write ``destination/sglang``: the installed SGLang with the series in its files.

    Such a fork is for images built from a source tree. ``patch -p1`` with the files of ``patches/``
    gives the same tree. The plugin finds the series in it and patches nothing. Raises
    ``PatchRefused`` before the first file is written.
    """
    series = series or load_series()
    plan = series.plan()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is not an empty folder; the fork needs one")
    shutil.copytree(
        series.root / series.distribution,
        destination / series.distribution,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for module in plan.modules:
        (destination / module.file).write_bytes(module.text.encode())
    return plan.functions


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _read_patch(file: Path, found: str) -> Patch:
    try:
        return Patch(file.name, exact.read_diff(file.read_text(encoding="utf-8")))
    except exact.Unreadable as error:
        raise PatchRefused(str(error), found=found, patch=file.name) from error


def _patches_in(lines: Sequence[Line]) -> tuple[str, ...]:
    return tuple(sorted({name for line in lines for name in line.patches}))


def _patch_near(lines: Sequence[Line], number: int | None, otherwise: str) -> str:
    """Return the last patch to touch a line around ``number``, for a message."""
    at = (number or 1) - 1
    for line in (*lines[at : at + 3], *reversed(lines[max(0, at - 3) : at])):
        if line.patches:
            return line.patches[-1]
    return otherwise


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))
