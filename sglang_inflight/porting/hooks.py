"""Check that our hooks' targets exist and take the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_inflight.plugin import every_hook
from sglang_inflight.porting.finding import Finding
from sglang_inflight.porting.parameters import Parameters, why_no_replacement
from sglang_inflight.porting.source_tree import FunctionNode, SourceTree, is_property

# arguments passed to a hook before the function's own
_AHEAD = {"BEFORE": 0, "AFTER": 1, "AROUND": 1, "REPLACE": 0}


def look_at_hooks(tree: SourceTree) -> list[Finding]:
    return [
        Finding("hook", target, why_not_hooked(tree, target, hook, kind.name), (target,))
        for target, hook, kind in every_hook()
    ]


def why_not_hooked(
    tree: SourceTree, target: str, hook: Callable[..., Any], kind: str
) -> str | None:
    definition = tree.find(target)
    if definition is None:
        return "it is not there"
    node = definition.node
    if not isinstance(node, FunctionNode) or is_property(node):
        return "it is no function there"
    theirs = Parameters.of_node(node)
    ours = Parameters.of_function(hook).without_first(_AHEAD[kind])
    if definition.owner is not None and theirs.positional and ours.positional:
        # drop self, named differently
        theirs, ours = theirs.without_first(), ours.without_first()
    return why_no_replacement(theirs, ours)
