"""Read each token's version from an answer's ``meta_info``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from sglang_inflight.client.answers import WrongAnswer

Of = Literal["weight_versions", "kv_versions", "adapter_versions"]


class Span(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) belong to ``version``.

    The epoch counts the commits and rollbacks of ``server``; None is the answering server. One
    version may serve in several epochs.
    """

    version: str
    start: int
    end: int
    epoch: int | None = None
    server: str | None = None


def read_spans(meta_info: Mapping[str, Any], of: Of = "weight_versions") -> list[Span]:
    """Return an answer's spans, empty if it has none.

    ``weight_versions``: output tokens, by the weights of their forward's launch.
    ``kv_versions``: prompt and output tokens, by the weights that computed their KV.
    ``adapter_versions``: output tokens, by the version of their adapter.

    Raises ``WrongAnswer`` for a malformed span.
    """
    try:
        return [
            Span(span["version"], span["start"], span["end"], span.get("epoch"), span.get("server"))
            for span in meta_info.get(of) or []
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise WrongAnswer(f"{of} holds a malformed span: {meta_info[of]!r}") from error


def cover_exactly(spans: Sequence[Span], tokens: int) -> bool:
    """Return whether each of ``tokens`` tokens lies in exactly one span, and no span is empty.

    An answer without tokens has one empty span, with the version in place at its end.
    """
    if tokens == 0:
        return all((span.start, span.end) == (0, 0) for span in spans)
    ends = [0, *(span.end for span in spans)]
    return (
        all(span.start == end for span, end in zip(spans, ends, strict=False))
        and all(earlier < later for earlier, later in pairwise(ends))
        and ends[-1] == tokens
    )


def version_per_token(meta_info: Mapping[str, Any]) -> list[str]:
    """Return the version of each output token, in order.

    Raises ``WrongAnswer`` if the spans miss a token or overlap.
    """
    spans = read_spans(meta_info)
    tokens = meta_info["completion_tokens"]
    if not cover_exactly(spans, tokens):
        raise WrongAnswer(f"these spans do not cover {tokens} tokens exactly: {spans}")
    return names_by_token(spans)


def names_by_token(spans: Iterable[Span]) -> list[str]:
    """Return the version of each token, or of each position, of spans without gaps."""
    return [span.version for span in spans for _ in range(span.start, span.end)]


def in_order(spans: Iterable[Span], versions: Sequence[str]) -> bool:
    """Return whether the spans' versions are a subsequence of ``versions``."""
    remaining = iter(versions)
    return all(span.version in remaining for span in spans)
