"""Parse a package's source without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Definition of a dotted name.

    ``node`` is the binding statement, and None for a module. ``owner`` is the class of a member.
    """

    module: str
    node: ast.stmt | None
    owner: Definition | None = None


class SourceTree:
    """The modules below ``root``, the package's parent folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # caches per object: a cache on the class would keep every tree alive
        self.parse = functools.cache(self._parse)
        self.bindings = functools.cache(self._bindings)
        self._members = functools.cache(_members_of)

    def file(self, module: str) -> Path | None:
        path = self.root / module.replace(".", "/")
        files = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in files if file.is_file()), None)

    def find(self, dotted: str) -> Definition | None:
        """Return the definition of ``dotted``, following imports by name."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            # a folder without __init__.py is a module too, but binds nothing
            if self.file(module) is not None:
                return self._descend(Definition(module, None), parts[end:])
        return None

    def within(self, module: str, name: str) -> Definition | None:
        """Return the definition of ``name`` in ``module``; submodules count, too."""
        node = self.bindings(module).get(name)
        if node is None:
            inner = f"{module}.{name}"
            return Definition(inner, None) if self.file(inner) else None
        if not isinstance(node, ast.ImportFrom):
            return Definition(module, node)
        source = self._source(module, node)
        original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
        if self.file(source) is None:
            # imported from another package
            return Definition(module, node)
        if source == module:
            return self.find(f"{source}.{original}") if original != name else None
        return self.within(source, original)

    def classes(self, definition: Definition) -> Iterator[Definition]:
        """Yield the class and its bases in this package, nearest first."""
        seen = set[int]()
        waiting = [definition]
        while waiting:
            each = waiting.pop(0)
            if not isinstance(each.node, ast.ClassDef) or id(each.node) in seen:
                continue
            seen.add(id(each.node))
            yield each
            for base in each.node.bases:
                found = self._evaluate(each.module, base)
                if found is not None:
                    waiting.append(found)

    def member(self, definition: Definition, name: str) -> Definition | None:
        """Return an attribute of the class, or one set on ``self`` by its methods."""
        for each in self.classes(definition):
            assert isinstance(each.node, ast.ClassDef)
            if (node := self._members(each.node).get(name)) is not None:
                return Definition(each.module, node, each)
        return None

    def member_names(self, definition: Definition) -> set[str]:
        nodes = [each.node for each in self.classes(definition)]
        return {n for node in nodes if isinstance(node, ast.ClassDef) for n in self._members(node)}

    def _descend(self, found: Definition, path: Sequence[str]) -> Definition | None:
        for name in path:
            if found.node is None:
                inner = self.within(found.module, name)
            elif isinstance(found.node, ast.ClassDef):
                inner = self.member(found, name)
            else:
                inner = None
            if inner is None:
                return None
            found = inner
        return found

    def _evaluate(self, module: str, expression: ast.expr) -> Definition | None:
        if isinstance(expression, ast.Subscript):
            return self._evaluate(module, expression.value)
        names = ast.unparse(expression).split(".")
        first = self.within(module, names[0])
        if first is not None and isinstance(first.node, ast.Import):
            return self.find(ast.unparse(expression))
        return self._descend(first, names[1:]) if first is not None else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.file(module)
        is_package = file is not None and file.name == "__init__.py"
        parts = module.split(".")
        package = parts[: len(parts) - node.level + is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _parse(self, module: str) -> ast.Module | None:
        file = self.file(module)
        return ast.parse(file.read_text(encoding="utf-8")) if file is not None else None

    def _bindings(self, module: str) -> dict[str, ast.stmt]:
        tree = self.parse(module)
        bound: dict[str, ast.stmt] = {}
        for node in _statements(tree.body if tree is not None else []):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                source = self._source(module, node)
                if self.file(source) is not None and source != module:
                    for name in self.bindings(source):
                        each = ast.ImportFrom(source, [ast.alias(name)], 0)
                        bound.setdefault(name, each)
            for name in _names_bound(node):
                # the first binding counts, as for a type checker
                bound.setdefault(name, node)
        return bound


def _members_of(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return names bound by the class statement, and by its methods on their first parameter."""
    found: dict[str, ast.stmt] = {}
    methods: list[FunctionNode] = []
    for statement in _statements(node.body):
        for name in _names_bound(statement):
            # the last binding counts: the function itself follows its overloads
            found[name] = statement
        if isinstance(statement, FunctionNode):
            methods.append(statement)
    for method in methods:
        parameters = [*method.args.posonlyargs, *method.args.args]
        if not parameters:
            continue
        for inner in ast.walk(method):
            if isinstance(inner, ast.stmt):
                for target in _targets(inner):
                    if not isinstance(target, ast.Attribute):
                        continue
                    if ast.unparse(target.value) == parameters[0].arg:
                        found.setdefault(target.attr, inner)
    return found


def is_property(node: ast.stmt | None) -> bool:
    if not isinstance(node, FunctionNode):
        return False
    names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, also those within ``if``, ``try`` and the like."""
    for node in body:
        yield node
        if isinstance(node, FunctionNode | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, FunctionNode | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names if alias.name != "*")
    else:
        yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        targets: Sequence[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
                yield each
