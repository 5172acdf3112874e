"""Which weights made which token, from an answer's ``meta_info``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from sglang_inflight.client.unheard import WrongAnswer

Of = Literal["weight_versions", "kv_versions", "adapter_versions"]


class Span(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) belong to ``version``.

    The epoch counts a server's commits and rollbacks: one version may serve in several. It is
    that of ``server``, or of the server that answers where that is None.
    """

    version: str
    start: int
    end: int
    epoch: int | None = None
    server: str | None = None


def read_spans(meta_info: Mapping[str, Any], of: Of = "weight_versions") -> list[Span]:
    """Of the output tokens, by the weights that their forward was launched with; or, of
    ``kv_versions``, of prompt and output, by the weights that computed the KV they used; or, of
    ``adapter_versions``, of the output tokens, by the versions of their adapter.

    Empty where the server has said none. Raises ``WrongAnswer`` for what is no span.
    """
    try:
        return [
            Span(span["version"], span["start"], span["end"], span.get("epoch"), span.get("server"))
            for span in meta_info.get(of) or []
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise WrongAnswer(f"{of} holds what is no span: {meta_info[of]!r}") from error


def cover_exactly(spans: Sequence[Span], tokens: int) -> bool:
    """Whether each of ``tokens`` tokens lies in one span, and no span is empty.

    But for no token at all: an answer then has an empty span, of who would have made one.
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
    """The version that made each output token, one after the other.

    Raises ``WrongAnswer`` where the spans leave a token out or have one twice.
    """
    spans = read_spans(meta_info)
    tokens = meta_info["completion_tokens"]
    if not cover_exactly(spans, tokens):
        raise WrongAnswer(f"{tokens} tokens are not what these spans cover: {spans}")
    return [span.version for span in spans for _ in range(span.start, span.end)]


def in_order(spans: Iterable[Span], versions: Sequence[str]) -> bool:
    """Whether the spans follow ``versions``, each at most once. Some may be missing."""
    remaining = iter(versions)
    return all(span.version in remaining for span in spans)
