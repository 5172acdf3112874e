"""Failing and abandoned control calls of ``sglang.Engine``.

``python -m tests.support.engine_containment MODEL ANSWERS`` writes the results as JSON. This is a
script because an engine's shutdown kills every child of its process, test servers included.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    FlushCacheReqInput,
    ReleaseMemoryOccupationReqInput,
)

from harness.starting import UPSTREAM

SAMPLING = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
# each would end an unprotected scheduler
BAD: list[dict[str, Any]] = [
    {"input_ids": [5, -7]},
    {"sampling_params": {"ignore_eos": "perhaps"}},
    {"return_logprob": True, "token_ids_logprob": [[5], [6, 7]]},
    {"session_params": {"id": 5}},
    {"return_logprob": "perhaps"},
]


def play(engine: Any) -> dict[str, Any]:
    return dict(engine.loop.run_until_complete(use(engine)))


async def use(engine: Any) -> dict[str, Any]:
    manager = engine.tokenizer_manager
    answers: dict[str, Any] = {}

    async def give_up(call: Any) -> None:
        """Cancel ``call`` after its message is sent and before its answer can be read."""
        calling = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()

    stream = await engine.async_generate(
        input_ids=[11, 6, 7], sampling_params=SAMPLING, stream=True
    )
    await anext(stream)

    check = manager.check_weights_communicator
    await give_up(check(CheckWeightsReqInput(action="first")))
    try:
        (answer,) = await check(CheckWeightsReqInput(action="second"))
        answers["check"] = answer.message
    except Exception as error:
        answers["check"] = str(error)

    flush = manager.flush_cache_communicator
    # the first flush answers only after the stream has ended
    await give_up(flush(FlushCacheReqInput(timeout_s=60.0)))
    (answer,) = await flush(FlushCacheReqInput())
    answers["flush"] = [answer.success, answer.message]

    try:
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
    except Exception as error:
        answers["release"] = [type(error).__name__, str(error)]
    if not UPSTREAM:
        answers["refused"] = [await refusal(engine, request) for request in BAD]
    async for chunk in stream:
        answers["tokens"] = chunk["output_ids"]
    return answers


async def refusal(engine: Any, request: dict[str, Any]) -> str:
    """Return the error of a request. Unlike HTTP, no caller checks the fields' types before."""
    try:
        await engine.async_generate(**{"input_ids": [5], **request})
    except ValueError as error:
        return str(error)
    return "accepted"


def main() -> None:
    model, answers = Path(sys.argv[1]), Path(sys.argv[2])
    engine = sglang.Engine(model_path=str(model), max_total_tokens=16384, max_running_requests=8)
    try:
        answers.write_text(json.dumps(play(engine)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
