"""The output of a request so far, as one server tells it and another one takes it.

``extensions/continued/so_far.py`` has its form. An entry of a list belongs to a token; a span is of
the whole output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# a field of a request's ``custom_params``
OUTPUT_SO_FAR = "output_so_far"
# spans of the whole output
OF_ALL_TOKENS = ("weight_versions", "adapter_versions")
# lists of ``meta_info`` with an entry for each output token
LOGPROBS = "output_token_logprobs"
ROWS = {
    "output_top_logprobs": "top_logprobs",
    "output_token_ids_logprobs": "token_ids_logprobs",
}
LISTS = (LOGPROBS, *ROWS)


def describe_output(
    tokens: Sequence[int], meta: Mapping[str, Any], since: int = 0
) -> dict[str, list[Any]]:
    """Return ``tokens`` as another server takes them.

    ``meta`` is the ``meta_info`` of the whole output, whose token ``since`` is the first of
    ``tokens``.
    """
    until = since + len(tokens)
    found: dict[str, list[Any]] = {"token_ids": list(tokens)}
    found |= {name: meta[name] for name in OF_ALL_TOKENS if meta.get(name)}
    if (values := meta.get(LOGPROBS)) is not None:
        found["logprobs"] = [value for value, *_ in values[since:until]]
    for name, given in ROWS.items():
        if (rows := meta.get(name)) is not None:
            found[given] = [
                [[value, token] for value, token, *_ in row or ()] for row in rows[since:until]
            ]
    return found
