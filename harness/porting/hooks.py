"""Check that our hooks' targets exist and take the same parameters."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeGuard

from harness.porting import Finding
from sglang_inflight.plugin import hook_modules
from sglang_inflight.vocabulary.calls import Call
from sglang_inflight_tools.parameters import Parameters
from sglang_inflight_tools.source_tree import FunctionNode, SourceTree
from sglang_inflight_tools.targets import why_not_hooked

_METHOD = ast.parse("def instead(sglangs, engine, *args, **named): ...").body[0]


@dataclass(frozen=True)
class ReadFunction:
    """A function of ours in the source. Where hooks are declared it stands for itself."""

    node: FunctionNode

    @property
    def name(self) -> str:
        return self.node.name

    def __call__(self, given: Any) -> ReadFunction:
        """Return the function that this one defines."""
        (made,) = (node for node in self.node.body if isinstance(node, FunctionNode))
        return ReadFunction(made)


def look_at_hooks(tree: SourceTree, ours: SourceTree) -> list[Finding]:
    return [
        Finding("hook", target, why_not_hooked(tree, target, parameters, kind), (target,))
        for target, parameters, kind in read_hooks(ours)
    ]


def read_hooks(ours: SourceTree) -> Iterator[tuple[str, Parameters, str]]:
    """Yield the target, our parameters and the kind of every hook, without importing a hook.

    The order is the one of ``hooking.hooks_of``.
    """
    found = [each for module in hook_modules() for each in _declared(ours, module)]
    for target, _, function, kind in sorted(found, key=lambda each: each[:2]):
        yield target, Parameters.of_node(function.node), kind


def _declared(ours: SourceTree, module: str) -> Iterator[tuple[str, int, ReadFunction, str]]:
    """Yield target, order, function and kind of the hooks that ``module`` declares."""
    tree = ours.parse(module)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, FunctionNode):
            for call in node.decorator_list:
                if not _calls(call, "hook"):
                    continue
                target, kind = call.args
                order = next((each.value for each in call.keywords if each.arg == "order"), None)
                yield (
                    _evaluate(ours, module, target),
                    _evaluate(ours, module, order) if order is not None else 0,
                    ReadFunction(node),
                    ast.unparse(kind),
                )
        if isinstance(node, ast.Expr) and _calls(node.value, "hook_each"):
            _, functions, kind = node.value.args
            for each, function in _evaluate(ours, module, functions).items():
                yield each, 0, function, ast.unparse(kind)


def _calls(node: ast.expr, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _value(ours: SourceTree, module: str, name: str) -> Any:
    """Return the value of a module's constant, with a ``ReadFunction`` for each function."""
    if name == "EngineMethod":
        return _engine_method
    definition = ours.within(module, name)
    if definition is not None and definition.module.startswith("sglang_inflight.vocabulary."):
        # it imports neither SGLang nor torch
        return getattr(importlib.import_module(definition.module), name)
    node = definition.node if definition is not None else None
    if isinstance(node, FunctionNode):
        return ReadFunction(node)
    if definition is None or not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
        raise ValueError(f"{module}: its hooks cannot be read: what is {name}?")
    return _evaluate(ours, definition.module, node.value)


def _evaluate(ours: SourceTree, module: str, node: ast.expr) -> Any:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    bound = {each.id for each in names if isinstance(each.ctx, ast.Store)} | vars(builtins).keys()
    values = {n: _value(ours, module, n) for n in {each.id for each in names} - bound}
    return eval(compile(ast.Expression(node), module, "eval"), values)


def _engine_method(call: Call, *args: Any, **named: Any) -> SimpleNamespace:
    """Return an ``EngineMethod`` as ``hook_each`` reads it. Its hook takes any arguments."""
    assert isinstance(_METHOD, FunctionNode)
    return SimpleNamespace(
        name=call.name, is_sglangs=call.is_sglangs, instead=ReadFunction(_METHOD)
    )
