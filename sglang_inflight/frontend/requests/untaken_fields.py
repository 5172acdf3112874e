"""Refuse fields of requests that need an extension which is off: SGLang would ignore them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sglang_inflight.settings import extensions_on
from sglang_inflight.vocabulary.contracts import FIELDS, MAX_VERSION_LAG, custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@functools.cache
def _untaken() -> tuple[str, ...]:
    taken = {name for extension in extensions_on() for name in extension.takes}
    return tuple(name for name in (*FIELDS, MAX_VERSION_LAG) if name not in taken)


def refuse_untaken_fields(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a field that nobody would heed."""
    for name in _untaken():
        if custom_param(params, name) is not None:
            raise ValueError(f"custom_params.{name}: the extension that takes it is off")
