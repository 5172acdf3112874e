"""Compile one function of a patched source into its loaded module.

A method is compiled inside a copy of its class statement without other members, and only the code
of that class body is run. So the compiler mangles private names, sets qualified names, and creates
the ``__class__`` cell for zero-argument ``super()``, as for the real class. The cell is then
pointed at the real class.
"""

from __future__ import annotations
import __future__

import ast
import copy
import linecache
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any

from sglang_inflight.livepatch.functions import ChangedFunction


def show_in_tracebacks(filename: str, text: str) -> None:
    """Put the source into ``linecache``. Without a modification time the entry is never evicted."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def build(
    function: ChangedFunction,
    tree: ast.Module,
    filename: str,
    module: ModuleType,
    owner: ModuleType | type,
) -> Any:
    """Return the object that the ``def`` would bind in ``owner``, with decorators and defaults."""
    statement: ast.stmt = function.node
    for outer in reversed(function.classes):
        statement = _class_with_only(statement, outer)
    code = compile(
        ast.Module([statement], []), filename, "exec", flags=_future_flags(tree), dont_inherit=True
    )
    for outer in function.classes:
        code = _body_of(code, outer.name)
    namespace = _ClassNamespace(vars(owner) if function.classes else {})
    exec(code, vars(module), namespace)
    cell = namespace.get("__classcell__")
    if cell is not None:
        cell.cell_contents = owner
    return namespace[function.node.name]


class _ClassNamespace(dict[str, Any]):
    """A class namespace that reads missing names, as in decorators, from the real class."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__()
        self._members = members

    def __missing__(self, name: str) -> Any:
        return self._members[name]


def _class_with_only(statement: ast.stmt, original: ast.ClassDef) -> ast.ClassDef:
    bare = copy.copy(original)
    bare.bases, bare.keywords, bare.decorator_list, bare.body = [], [], [], [statement]
    return bare


def _body_of(code: CodeType, class_name: str) -> CodeType:
    return next(
        constant
        for constant in code.co_consts
        if isinstance(constant, CodeType) and constant.co_name == class_name
    )


def _future_flags(tree: ast.Module) -> int:
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    return flags
