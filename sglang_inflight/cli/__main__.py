"""``python -m sglang_inflight.cli``, for machines without the script ``sglang-inflight``."""

from sglang_inflight.cli import app

app()
