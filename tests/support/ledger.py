"""The ledger: ``patches/README.md`` for the core, and each extension's ``README.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.starting import ROOT
from sglang_inflight.plugin import hook_modules

FOLDER = ROOT / "sglang_inflight" / "extensions"


@dataclass(frozen=True)
class Ledger:
    """One page. ``modules`` declare the hooks of its table."""

    path: Path
    modules: tuple[str, ...]

    @property
    def sections(self) -> dict[str, str]:
        return _split(self.path.read_text(), "##")

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Hooks: the end of the target, the kind, and why."""
        table = self.sections.get("Hooks", "")
        return re.findall(r"^\| `([\w.]+)` \| (\w+) \| (.*) \|$", table, re.M)

    @property
    def mends(self) -> dict[str, str]:
        """Sections of hooks with a fix for SGLang."""
        return _split(self.sections.get("Hooks that mend SGLang", ""), "###")


def _split(text: str, heading: str) -> dict[str, str]:
    found = re.findall(rf"^{heading} (.+?)\n(.*?)(?=^{heading} |\Z)", text, re.M | re.S)
    return {title.strip("` "): below for title, below in found}


def _extension_of(module: str) -> str | None:
    _, is_there, below = module.partition(".extensions.")
    return below.partition(".")[0] if is_there else None


def _modules_of(extension: str | None) -> tuple[str, ...]:
    return tuple(each for each in hook_modules() if _extension_of(each) == extension)


# ledgers by extension; the core's is None's
LEDGERS: dict[str | None, Ledger] = {
    None: Ledger(ROOT / "patches" / "README.md", _modules_of(None)),
    **{
        path.parent.name: Ledger(path.parent / "README.md", _modules_of(path.parent.name))
        for path in sorted(FOLDER.glob("*/__init__.py"))
    },
}
