"""Check our Protocols against the members of SGLang's classes."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

import sglang_inflight
from sglang_inflight.porting.finding import Finding
from sglang_inflight.porting.parameters import Parameters, is_static, why_not_callable_as
from sglang_inflight.porting.source_tree import (
    Definition,
    FunctionNode,
    SourceTree,
    is_property,
    is_settable,
)
from sglang_inflight.sglang_types.describes import DESCRIBED, Description

FOLDERS = ("sglang_types", "scheduler.sglang_types", "frontend.sglang_types")


def look_at_protocols(tree: SourceTree, version: str) -> list[Finding]:
    return [
        finding
        for protocol, of in described().items()
        if of.since is None or Version(of.since) <= Version(version)
        for finding in _look_at(tree, protocol, of.classes)
    ]


def described() -> dict[type, Description]:
    """Return every Protocol with its description, after importing all modules of Protocols."""
    for folder in FOLDERS:
        package = importlib.import_module(f"{sglang_inflight.__name__}.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            # runtime_context imports SGLang itself, and has no Protocols
            if module.name != "runtime_context":
                importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(DESCRIBED)


def _look_at(tree: SourceTree, protocol: type, classes: tuple[str, ...]) -> Iterator[Finding]:
    found: list[Definition] = []
    for name in classes:
        definition = tree.find(name)
        if definition is None or not isinstance(definition.node, ast.ClassDef):
            yield Finding("protocol", protocol.__name__, f"there is no class {name}", (name,))
        else:
            found.append(definition)
    if not found:
        return
    for name, ours in members_of_protocol(protocol).items():
        theirs = next((m for each in found if (m := tree.member(each, name)) is not None), None)
        if theirs is None:
            reason: str | None = f"{classes[0].rpartition('.')[2]} has no such member"
        else:
            reason = _why_not(theirs, ours)
        yield Finding(
            "protocol",
            f"{protocol.__name__}.{name}",
            reason,
            tuple(f"{each}.{name}" for each in classes),
        )


def members_of_protocol(protocol: type) -> dict[str, Any]:
    """Return name -> function, property, or None for a writable attribute."""
    names = [
        *inspect.get_annotations(protocol),
        *(n for n, value in vars(protocol).items() if inspect.isfunction(value)),
        *(n for n, value in vars(protocol).items() if isinstance(value, property)),
    ]
    # typing.Protocol adds these two to every class
    return {n: vars(protocol).get(n) for n in names if n not in ("__init__", "__subclasshook__")}


def _why_not(theirs: Definition, ours: Any) -> str | None:
    node = theirs.node
    is_method = isinstance(node, FunctionNode) and not is_property(node)
    if not inspect.isfunction(ours):
        if is_method:
            return "it is a method there"
        if ours is None and is_property(node) and not is_settable(node):
            return "it can only be read there: make it a property"
        return None
    if not isinstance(node, FunctionNode) or not is_method:
        return "it is no method there"
    is_async = isinstance(node, ast.AsyncFunctionDef) and not _is_generator(node)
    if is_async != inspect.iscoroutinefunction(ours):
        return "it is async there" if is_async else "it is not async there"
    parameters = Parameters.of_node(node)
    if not is_static(node):
        parameters = parameters.without_first()
    return why_not_callable_as(parameters, Parameters.of_function(ours).without_first())


def _is_generator(node: ast.AsyncFunctionDef) -> bool:
    """Return whether a function is an asynchronous generator, a plain method in a Protocol."""
    return any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
