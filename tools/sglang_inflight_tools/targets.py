"""Check in the source of SGLang that a hook fits its target."""

from __future__ import annotations

from sglang_inflight_tools.parameters import Parameters, why_no_replacement
from sglang_inflight_tools.source_tree import FunctionNode, SourceTree, is_property

# arguments passed to a hook before the function's own
_AHEAD = {"BEFORE": 0, "AFTER": 1, "AROUND": 1, "REPLACE": 0}


def why_not_hooked(tree: SourceTree, target: str, ours: Parameters, kind: str) -> str | None:
    """Return why a hook with the parameters ``ours`` does not fit its target, or None."""
    definition = tree.find(target)
    if definition is None:
        return "it is not there"
    node = definition.node
    if not isinstance(node, FunctionNode) or is_property(node):
        return "it is no function there"
    theirs = Parameters.of_node(node)
    ours = ours.without_first(_AHEAD[kind])
    if definition.owner is not None and theirs.positional and ours.positional:
        # drop self, named differently
        theirs, ours = theirs.without_first(), ours.without_first()
    return why_no_replacement(theirs, ours)
