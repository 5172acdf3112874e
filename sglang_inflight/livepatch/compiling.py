"""One function of a patched source, compiled alone into its living module.

A method is compiled inside a copy of its class statement that holds nothing else, and
the code of that class body is run by itself. So the compiler does what it does for the
real class: it mangles private names, gives qualified names, and makes the ``__class__``
cell that zero-argument ``super()`` reads. The cell is then pointed at the real class.
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
    """Without a modification time, ``linecache`` keeps the entry and reads no file."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def build(
    function: ChangedFunction,
    tree: ast.Module,
    filename: str,
    module: ModuleType,
    owner: ModuleType | type,
) -> Any:
    """What its ``def`` statement would bind in ``owner``, decorators and defaults evaluated."""
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
    """Reads fall through to the real class: a decorator or default may name its members."""

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
