"""Refuse fields of requests that need an extension which is off: SGLang would ignore them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sglang_inflight.extension import all_extensions
from sglang_inflight.settings import extensions_on
from sglang_inflight.vocabulary.contracts import FIELDS, MAX_VERSION_LAG, custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@functools.cache
def _untaken() -> tuple[str, ...]:
    taken = {name for extension in extensions_on() for name in extension.takes}
    # the core knows some fields of extensions that may not be installed
    known = {*FIELDS, MAX_VERSION_LAG, *(n for each in all_extensions() for n in each.takes)}
    return tuple(sorted(known - taken))


def refuse_untaken_fields(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a field that nobody would heed."""
    for name in _untaken():
        if custom_param(params, name) is not None:
            raise ValueError(f"custom_params.{name}: the extension that takes it is off")
