"""Makes a request emit given tokens, by the forwards that would sample them."""

from __future__ import annotations

from sglang_inflight.extension import Extension

# fields of a request's ``custom_params``: the tokens, and how many are sampled behind them
FORCED_TOKEN_IDS = "forced_token_ids"
SAMPLE_AFTER_FORCED = "sample_after_forced"

EXTENSION = Extension(
    name="forced",
    modules=(
        "sglang_inflight.extensions.forced.checks",
        "sglang_inflight.extensions.forced.forced",
    ),
    takes=(FORCED_TOKEN_IDS, SAMPLE_AFTER_FORCED),
    offers=("forced_tokens",),
)
