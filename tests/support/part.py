"""``python -m tests.support.part PART``: print pytest's arguments for a part of the tests.

A part is a path, or the name of an extension, of a file of tests, or of a test. Without one, all
tests are meant.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.starting import ROOT


class NoPart(LookupError):
    """No test has the name."""


def select(part: str) -> list[str]:
    """Return pytest's arguments. Raises ``NoPart``."""
    if not part:
        return []
    if part.startswith("tests") and (ROOT / part.partition("::")[0]).exists():
        return [part]
    folder = ROOT / "tests" / "extensions" / part
    found = [folder] if folder.is_dir() else [*_files(part)]
    if found:
        return [str(path.relative_to(ROOT)) for path in found]
    if tests := [*_tests(part)]:
        return tests
    raise NoPart(f"no path, extension, file of tests or test is named {part!r}")


def _files(part: str) -> Iterator[Path]:
    stem = part.removesuffix(".py").removeprefix("test_")
    yield from sorted((ROOT / "tests").rglob(f"test_{stem}.py"))


def _tests(part: str) -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(rf"^def {re.escape(part)}\(", path.read_text(), re.MULTILINE):
            yield f"{path.relative_to(ROOT)}::{part}"


if __name__ == "__main__":
    try:
        print(*select(" ".join(sys.argv[1:])))
    except NoPart as error:
        sys.exit(str(error))
