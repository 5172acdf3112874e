"""Outputs that requests have had elsewhere. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sglang_inflight.vocabulary.bodies import LONGEST_VERSION, check_version
from sglang_inflight.vocabulary.labels import AdapterLabel, VersionLabel

_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_VERSION)]
# log probability and token
Likely = tuple[float, _Whole]


class GivenSpan(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens ``start`` to ``end`` - 1 were made by ``version`` in an epoch of ``server``."""

    version: _Name
    start: _Whole
    end: _Whole
    epoch: _Whole
    server: _Name

    def __post_init__(self) -> None:
        check_version(self.version)
        # packed labels separate their parts by spaces
        if not self.server.isprintable() or " " in self.server:
            raise ValueError(f"server {self.server[:40]!r} has spaces, or is not printable")

    @property
    def label(self) -> VersionLabel:
        return VersionLabel(self.epoch, self.version, self.server)


class GivenAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens ``start`` to ``end`` - 1 were made with ``version`` of ``adapter``."""

    adapter: _Name
    version: _Name
    start: _Whole
    end: _Whole

    def __post_init__(self) -> None:
        check_version(self.adapter)
        check_version(self.version)

    @property
    def label(self) -> AdapterLabel:
        return AdapterLabel(self.adapter, self.version)


class OutputSoFar(msgspec.Struct, forbid_unknown_fields=True):
    """The output of a request that goes on. Each list has an entry for each token, or is None.

    ``top_logprobs`` has the likeliest tokens, and ``token_ids_logprobs`` the tokens that the
    request named.
    """

    token_ids: Annotated[list[_Whole], msgspec.Meta(min_length=1)]
    weight_versions: list[GivenSpan]
    adapter_versions: list[GivenAdapter] = []
    logprobs: list[float] | None = None
    top_logprobs: list[list[Likely]] | None = None
    token_ids_logprobs: list[list[Likely]] | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        _require_cover("weight_versions", self.weight_versions, count)
        if self.adapter_versions:
            _require_cover("adapter_versions", self.adapter_versions, count)
        for name in ("logprobs", "top_logprobs", "token_ids_logprobs"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise ValueError(f"{name} has {len(given)} entries, for {count} tokens")


def _require_cover(name: str, spans: Sequence[GivenSpan | GivenAdapter], count: int) -> None:
    ends = [0, *(span.end for span in spans)]
    follow = all(span.start == end < span.end for span, end in zip(spans, ends, strict=False))
    if not follow or ends[-1] != count:
        raise ValueError(f"{name} must have each of {count} tokens in one span, in order")


def read_so_far(value: Any) -> OutputSoFar:
    """Raises ``ValueError`` for anything but an output."""
    try:
        return msgspec.convert(value, OutputSoFar)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
