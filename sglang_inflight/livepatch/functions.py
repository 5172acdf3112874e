"""Find a module's changed functions, prove that nothing else changed, and compile them.

A function is compiled alone, into its loaded module. A method is compiled inside a copy of its
class statement without other members, and only the code of that class body is run. So the compiler
mangles private names, sets qualified names, and creates the ``__class__`` cell for zero-argument
``super()``, as for the real class. The cell is then pointed at the real class.
"""

from __future__ import annotations
import __future__

import ast
import copy
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class BeyondBodies(Exception):
    """More changed than the bodies of functions."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line


@dataclass(frozen=True)
class ChangedFunction:
    """A module-level function, or a method with the classes around it, outermost first."""

    node: FunctionNode
    classes: tuple[ast.ClassDef, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return (*(outer.name for outer in self.classes), self.node.name)

    @property
    def qualname(self) -> str:
        return ".".join(self.path)

    @property
    def first_line(self) -> int:
        return _first_line(self.node)

    @property
    def last_line(self) -> int:
        return _last_line(self.node)


@dataclass(frozen=True)
class Module:
    """A parsed module with its lines: comparing text first is faster than comparing trees."""

    tree: ast.Module
    lines: Sequence[str]

    @classmethod
    def parse(cls, text: str, filename: str) -> Module:
        return cls(ast.parse(text, filename), text.split("\n"))

    def text(self, node: ast.stmt) -> tuple[int, int, Sequence[str]]:
        span = self.lines[_first_line(node) - 1 : _last_line(node)]
        return node.col_offset, node.end_col_offset or 0, span


def changed_functions(before: Module, after: Module) -> list[ChangedFunction]:
    """Return the changed functions. Raises ``BeyondBodies`` if more than bodies changed.

    Comments may change anywhere.
    """
    return list(_compare(before, after, before.tree.body, after.tree.body, ()))


def _compare(
    before: Module,
    after: Module,
    old_body: Sequence[ast.stmt],
    new_body: Sequence[ast.stmt],
    classes: tuple[ast.ClassDef, ...],
) -> Iterator[ChangedFunction]:
    for old, new in zip(old_body, new_body, strict=False):
        if before.text(old) == after.text(new):
            continue
        if type(old) is not type(new):
            raise BeyondBodies(_first_line(new), _ONLY_BODIES)
        if isinstance(old, FunctionNode | ast.ClassDef) and _header(old) != _header(new):
            raise BeyondBodies(_first_line(new), _ONLY_BODIES)
        if isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef):
            yield from _compare(before, after, old.body, new.body, (*classes, new))
        elif ast.dump(old) == ast.dump(new):
            continue
        elif isinstance(new, FunctionNode):
            if sum(_binds(other, new.name) for other in new_body) > 1:
                raise BeyondBodies(new.lineno, f"'{new.name}' is defined more than once")
            yield ChangedFunction(new, classes)
        else:
            raise BeyondBodies(_first_line(new), _ONLY_BODIES)
    if len(old_body) != len(new_body):
        shorter = min(len(old_body), len(new_body))
        line = _first_line((new_body if len(new_body) > shorter else old_body)[shorter])
        raise BeyondBodies(line, _ONLY_BODIES)


_ONLY_BODIES = "a patch changes the bodies of functions and methods, and nothing else"


def _header(node: ast.stmt) -> str:
    bare = copy.copy(node)
    bare.body = []  # type: ignore[attr-defined]
    return ast.dump(bare)


def _binds(node: ast.stmt, name: str) -> bool:
    return isinstance(node, FunctionNode | ast.ClassDef) and node.name == name


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, FunctionNode | ast.ClassDef) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def function_at(text: str, line: int) -> str | None:
    """Return the qualified name of the function or method around ``line``, for a message."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None

    def search(body: Sequence[ast.stmt], path: tuple[str, ...]) -> str | None:
        for node in body:
            if _first_line(node) <= line <= _last_line(node):
                if isinstance(node, FunctionNode):
                    return ".".join((*path, node.name))
                if isinstance(node, ast.ClassDef):
                    return search(node.body, (*path, node.name))
        return None

    return search(tree.body, ())


def show_in_tracebacks(filename: str, text: str, lines: list[str]) -> None:
    """Put the source into ``linecache``. Without a modification time the entry is never evicted."""
    linecache.cache[filename] = (len(text), None, lines, filename)


def compiled(function: ChangedFunction, tree: ast.Module, filename: str) -> CodeType:
    """Return the code that binds the function, alone, in its module or in its class."""
    statement: ast.stmt = function.node
    for outer in reversed(function.classes):
        statement = _class_with_only(statement, outer)
    code = compile(
        ast.Module([statement], []), filename, "exec", flags=_future_flags(tree), dont_inherit=True
    )
    for outer in function.classes:
        code = _body_of(code, outer.name)
    return code


def build(
    function: ChangedFunction, code: CodeType, module: ModuleType, owner: ModuleType | type
) -> Any:
    """Return the object that the ``def`` would bind in ``owner``, with decorators and defaults."""
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
