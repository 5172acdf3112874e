"""Check all our assumptions about SGLang against one version."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from sglang_inflight.livepatch import Series, read_series, supported_versions
from sglang_inflight.porting.finding import Finding
from sglang_inflight.porting.hooks import look_at_hooks
from sglang_inflight.porting.imports import DEVELOPERS, HOUSE, look_at_imports
from sglang_inflight.porting.patches import look_at_patches
from sglang_inflight.porting.protocols import look_at_protocols
from sglang_inflight.porting.source_tree import SourceTree
from sglang_inflight.porting.whereabouts import Whereabouts


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


def survey(root: Path, version: str) -> Survey:
    """Survey the SGLang in ``root``, without importing it."""
    tree = SourceTree(root)
    series = nearest_series(version)
    findings = (
        *look_at_patches(series, root),
        *look_at_hooks(tree),
        *look_at_protocols(tree, version),
        *look_at_imports(tree),
        *_of_developers(tree),
    )
    whereabouts = Whereabouts(tree)
    hints = {
        finding.name: [hint for name in finding.upstream for hint in whereabouts.of(name)]
        for finding in findings
        if not finding.fits
    }
    return Survey(version, series.name, findings, hints)


def _of_developers(tree: SourceTree) -> list[Finding]:
    """Check the imports of tests and benchmarks, if their folders exist."""
    folders = (HOUSE.parent / name for name in DEVELOPERS)
    findings = [
        finding
        for folder in folders
        if (folder / "__init__.py").is_file()
        for finding in look_at_imports(tree, folder)
    ]
    return [replace(finding, kind="test") for finding in findings]


def nearest_series(version: str) -> Series:
    """Return the version's own series, else the next older one, else the oldest."""
    known = sorted(supported_versions(), key=Version)
    older = [each for each in known if Version(each) <= Version(version)]
    return read_series(older[-1] if older else known[0])
