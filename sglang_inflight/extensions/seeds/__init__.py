"""Gives each sample a seed of its own, and says which."""

from __future__ import annotations

from sglang_inflight.extension import Extension

# a field of ``meta_info``: the seed by which a request's tokens were sampled
SAMPLING_SEED = "sampling_seed"

EXTENSION = Extension(
    name="seeds",
    modules=(
        "sglang_inflight.extensions.seeds.on_rank",
        "sglang_inflight.extensions.seeds.seeds",
    ),
    answers=(SAMPLING_SEED,),
)
