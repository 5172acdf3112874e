"""Gives a decoding step a wait, in which it leaves its core to others.

The model of a test is so small that a step is Python alone. A request that runs beside what a test
does would then take a core from it. A step on a card leaves the host's cores alone for
milliseconds, and so does a step here.

Only tests set the variable: benchmarks measure steps without a wait.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.eager_runner import EagerRunner

from harness.starting import STEP_MS


def install() -> None:
    execute = EagerRunner.execute

    @functools.wraps(execute)
    def wait_and_execute(
        self: EagerRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> Any:
        # a wait of zero would still give the core away
        if forward_batch.forward_mode.is_decode() and (wait_s := _wait_s()):
            time.sleep(wait_s)
        return execute(self, forward_batch, *args, **kwargs)

    EagerRunner.execute = wait_and_execute  # type: ignore[method-assign]


@functools.cache
def _wait_s() -> float:
    """Read the environment in the fork, which has its own."""
    return float(os.environ.get(STEP_MS, "0")) / 1000
