"""Check all our assumptions about SGLang against one version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from sglang_inflight.livepatch import Series, read_series, supported_versions
from sglang_inflight.porting.finding import Finding
from sglang_inflight.porting.hooks import look_at_hooks
from sglang_inflight.porting.patches import look_at_patches
from sglang_inflight.porting.source_tree import SourceTree
from sglang_inflight.porting.uses import HOUSE, look_at_bodies, look_at_uses
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
