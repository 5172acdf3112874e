"""Servers with several tokenizer workers (``--tokenizer-worker-num``)."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="workers",
    modules=(
        "sglang_inflight.extensions.workers.hooks",
        "sglang_inflight.extensions.workers.joins",
        "sglang_inflight.extensions.workers.request_names",
        "sglang_inflight.extensions.workers.worker",
    ),
    serves=("tokenizer_worker_num",),
    requires=("aborts", "adapters", "fleet"),
)
