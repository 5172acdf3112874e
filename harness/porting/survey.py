"""Check all our assumptions about SGLang against one version.

A misfit has hints on where a name of SGLang's moved: equal and similar names.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from harness.porting import Finding
from harness.porting.hooks import look_at_hooks
from harness.porting.patches import look_at_patches
from harness.porting.uses import HOUSE, look_at_bodies, look_at_uses
from sglang_inflight.livepatch import Series, read_series, supported_versions
from sglang_inflight_tools.source_tree import SourceTree

# most hints of each kind
MOST = 4
_BINDS = r"(?m)^[ \t]*(?:(?:async )?def|class) +{name}\b|^[ \t]*(?:self\.)?{name}\b *[:=][^=]"


@dataclass(frozen=True)
class Survey:
    """All findings. ``hints`` maps a misfit's name to hints."""

    version: str
    series: str
    findings: tuple[Finding, ...]
    hints: dict[str, list[str]]

    @property
    def misfits(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.fits]

    @property
    def keeps_a_server_from_running(self) -> bool:
        """True if a misfit outside the tests exists. Tests may skip a version."""
        return any(finding.kind != "test" for finding in self.misfits)


def survey(root: Path, version: str, cache: Path) -> Survey:
    """Survey the SGLang in ``root``, without importing it. ``cache`` is for mypy."""
    tree = SourceTree(root)
    series = nearest_series(version)
    findings = (
        *look_at_patches(series, root),
        *look_at_hooks(tree, SourceTree(HOUSE.parent)),
        *look_at_uses(root, version, cache),
        *look_at_bodies(tree),
    )
    whereabouts = Whereabouts(tree)
    hints = {
        finding.name: [hint for name in finding.upstream for hint in whereabouts.of(name)]
        for finding in findings
        if not finding.fits
    }
    return Survey(version, series.name, findings, hints)


def nearest_series(version: str) -> Series:
    """Return the version's own series, else the next older one, else the oldest."""
    known = sorted(supported_versions(), key=Version)
    older = [each for each in known if Version(each) <= Version(version)]
    return read_series(older[-1] if older else known[0])


class Whereabouts:
    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree

    @cached_property
    def _texts(self) -> dict[Path, str]:
        """Source texts of the whole package, read on the first missing name."""
        files = sorted((self._tree.root / "sglang").rglob("*.py"))
        return {file: file.read_text(encoding="utf-8", errors="replace") for file in files}

    def of(self, dotted: str) -> list[str]:
        """Return hints, best first; none if ``dotted`` exists.

        A name without dots is a member of an unknown class: there is no hint of similar names.
        """
        if "." not in dotted:
            return self._same_name(dotted)
        if self._tree.find(dotted) is not None:
            return []
        return [*self._same_name(dotted), *self._names_like_it(dotted)]

    def _same_name(self, dotted: str) -> list[str]:
        name = dotted.rpartition(".")[2]
        binds = re.compile(_BINDS.format(name=re.escape(name)))
        hints = []
        for file, text in self._texts.items():
            found = binds.search(text)
            if found is not None:
                line = text.count("\n", 0, found.start()) + 1
                words = found.group().strip()
                hints.append(f"{file.relative_to(self._tree.root)}:{line}: {words}")
        # nearest modules first
        parts = dotted.split(".")
        hints.sort(key=lambda hint: -len(set(re.split(r"[/.:]", hint)) & set(parts)))
        return hints[:MOST]

    def _names_like_it(self, dotted: str) -> list[str]:
        owner, _, name = dotted.rpartition(".")
        definition = self._tree.find(owner)
        if definition is None:
            modules = {
                ".".join(file.relative_to(self._tree.root).with_suffix("").parts)
                for file in self._texts
            }
            alike = difflib.get_close_matches(owner, modules, MOST)
            return [f"a module like it: {each}" for each in alike]
        if isinstance(definition.node, ast.ClassDef):
            names = self._tree.member_names(definition)
        else:
            names = set(self._tree.bindings(definition.module))
        alike = difflib.get_close_matches(name, names, MOST)
        return [f"{owner.rpartition('.')[2]} has {', '.join(alike)}"] if alike else []
