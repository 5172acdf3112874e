"""Check that the names our modules import exist and accept our calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang_inflight
from sglang_inflight.porting.finding import Finding
from sglang_inflight.porting.parameters import Parameters
from sglang_inflight.porting.source_tree import Definition, FunctionNode, SourceTree

HOUSE = Path(sglang_inflight.__file__).parent
# folders beside the package in its repository
DEVELOPERS = ("harness", "benchmarks", "tests")
UPSTREAM = "sglang"
# the module of the classes that bodies name by a string (``vocabulary/bodies.py``)
MESSAGES = "sglang.srt.managers.io_struct"


def look_at_imports(tree: SourceTree, house: Path = HOUSE) -> list[Finding]:
    """Return one finding per name: the first misfit, if any."""
    findings: dict[str, Finding] = {}
    for file in sorted(house.rglob("*.py")):
        source = ast.parse(file.read_text(encoding="utf-8"))
        where = str(file.relative_to(house.parent))
        for finding in _look_at(tree, source, where):
            known = findings.get(finding.name)
            if known is None or known.fits:
                findings[finding.name] = finding
    return sorted(findings.values(), key=lambda finding: finding.name)


def _look_at(tree: SourceTree, source: ast.Module, where: str) -> Iterator[Finding]:
    # name in this file -> dotted name
    names: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and _is_upstreams(node.module):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names if _is_upstreams(alias.name)]
            yield from (_there(tree, name, where) for name in wanted)
        elif isinstance(node, ast.ClassDef):
            yield from (_there(tree, f"{MESSAGES}.{name}", where) for name in _names_class(node))
    yield from (_there(tree, name, where) for name in names.values())
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr.startswith("__"):
                continue
            dotted = names.get(node.value.id)
            definition = tree.find(dotted) if dotted is not None else None
            if definition is not None and _has_members(tree, definition):
                yield _there(tree, f"{dotted}.{node.attr}", where)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            dotted = names.get(node.func.id)
            definition = tree.find(dotted) if dotted is not None else None
            if definition is not None and dotted is not None:
                reason = _why_not_called(tree, definition, node)
                if reason is not None:
                    at = f"{where}:{node.lineno}: {reason}"
                    yield Finding("import", dotted, at, (dotted,))


def _names_class(body: ast.ClassDef) -> Iterator[str]:
    """Yield the string in ``sglang = "…"``."""
    for node in body.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="sglang")], value=ast.Constant(value=str(name))):
                yield name


def _there(tree: SourceTree, dotted: str, where: str) -> Finding:
    reason = None if tree.find(dotted) is not None else f"{where}: it is not there"
    return Finding("import", dotted, reason, (dotted,))


def _has_members(tree: SourceTree, definition: Definition) -> bool:
    """Return whether the source shows all members: a module, or a class without decorators."""
    if definition.node is None:
        return True
    return isinstance(definition.node, ast.ClassDef) and not definition.node.decorator_list


def _why_not_called(tree: SourceTree, definition: Definition, call: ast.Call) -> str | None:
    """Return why the call does not fit, or None. Checks arguments' names and number."""
    if isinstance(definition.node, FunctionNode):
        parameters = Parameters.of_node(definition.node)
    elif isinstance(definition.node, ast.ClassDef):
        init = tree.member(definition, "__init__")
        if init is None or not isinstance(init.node, FunctionNode):
            return _why_no_fields(tree, definition, call)
        parameters = Parameters.of_node(init.node).without_first()
    else:
        return None
    if isinstance(definition.node, FunctionNode) and definition.node.decorator_list:
        return None
    given = {keyword.arg for keyword in call.keywords}
    is_starred = None in given or any(isinstance(arg, ast.Starred) for arg in call.args)
    for name in sorted(each for each in given if each is not None):
        if name not in parameters.all and not parameters.takes_names:
            return f"it takes no parameter {name!r}"
    if is_starred:
        return None
    if len(call.args) > len(parameters.positional) and not parameters.takes_rest:
        return f"it takes {len(parameters.positional)} positional arguments"
    reached = given | set(parameters.positional[: len(call.args)])
    if missing := parameters.all - parameters.optional - reached:
        return f"it needs {', '.join(sorted(missing))}, too"
    return None


def _why_no_fields(tree: SourceTree, definition: Definition, call: ast.Call) -> str | None:
    """Return why a dataclass or struct does not take the call, or None."""
    fields = tree.member_names(definition)
    unknown = [k.arg for k in call.keywords if k.arg is not None and k.arg not in fields]
    return f"it has no field {unknown[0]!r}" if unknown else None


def _is_upstreams(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == UPSTREAM
