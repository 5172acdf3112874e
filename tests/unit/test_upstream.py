"""Our hooks fit the installed SGLang. mypy checks our other uses of SGLang."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import sglang_inflight
from harness.porting.hooks import look_at_hooks, read_hooks
from harness.porting.uses import look_at_bodies
from sglang_inflight.livepatch import installed_root, supported_versions
from sglang_inflight.plugin import every_hook
from sglang_inflight_tools.source_tree import SourceTree

OURS = SourceTree(Path(sglang_inflight.__file__).parents[1])


def test_installed_sglang_is_supported() -> None:
    assert version("sglang") in supported_versions()


def test_hooks_fit_installed_sglang() -> None:
    findings = look_at_hooks(SourceTree(installed_root("sglang")), OURS)
    assert [finding for finding in findings if not finding.fits] == []


def test_bodies_name_classes_of_installed_sglang() -> None:
    assert look_at_bodies(SourceTree(installed_root("sglang"))) == []


def test_hooks_read_in_the_source_are_the_registered_ones() -> None:
    assert [target for target, _, _ in read_hooks(OURS)] == [target for target, *_ in every_hook()]
