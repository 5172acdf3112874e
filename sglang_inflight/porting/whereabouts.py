"""Hints on where a name of SGLang's moved: equal and similar names."""

from __future__ import annotations

import ast
import difflib
import re
from functools import cached_property
from pathlib import Path

from sglang_inflight.porting.source_tree import SourceTree

# most hints of each kind
MOST = 4
_BINDS = r"(?m)^[ \t]*(?:(?:async )?def|class) +{name}\b|^[ \t]*(?:self\.)?{name}\b *[:=][^=]"


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
