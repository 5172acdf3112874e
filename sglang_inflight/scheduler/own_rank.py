"""This process's rank in a server."""

from __future__ import annotations

from sglang_inflight.sglang_types.runtime_context import get_parallel


def own_rank() -> tuple[int, int, int]:
    """Return the ranks of replica (or attention DP group), pipeline stage and TP."""
    parallel = get_parallel()
    dp_rank = parallel.attn_dp_rank if parallel.attn_dp_enabled else parallel.dp_rank or 0
    return dp_rank, parallel.pp_rank, parallel.tp_rank
