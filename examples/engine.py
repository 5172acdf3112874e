"""Change the weights of ``sglang.Engine`` while it generates, with an event loop and without.

python -m examples.engine --model-path /ckpt/step-0 --new /ckpt/step-1
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from typing import Any

import sglang

from sglang_inflight.client import read_spans

SAMPLING = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
IN_FLIGHT = {"non_blocking": True, "flush_cache": False}


def update_from_another_thread(engine: Any, checkpoint: str, version: str) -> None:
    """Update as soon as the first token is there, while another thread generates."""
    begun, ended = threading.Event(), threading.Event()

    def generate() -> None:
        stream = engine.generate("Once upon a time", SAMPLING, stream=True)
        next(stream)
        begun.set()
        *_, last = stream
        show("threads", last)
        ended.set()

    threading.Thread(target=generate).start()
    begun.wait()
    receipt = engine.update_weights_from_disk(checkpoint, weight_version=version, **IN_FLIGHT)
    print(f"{receipt['base_version']} -> {receipt['weight_version']}")
    ended.wait()


async def update_from_the_loop(engine: Any, checkpoint: str, version: str) -> None:
    """Make the same calls with ``async_`` before their names."""
    stream = await engine.async_generate("Once upon a time", SAMPLING, stream=True)
    await anext(stream)
    updating = asyncio.create_task(
        engine.async_update_weights_from_disk(checkpoint, weight_version=version, **IN_FLIGHT)
    )
    async for chunk in stream:
        last = chunk
    show("loop", last)
    receipt = await updating
    print(f"{receipt['base_version']} -> {receipt['weight_version']}")


def show(what: str, answer: dict[str, Any]) -> None:
    for span in read_spans(answer["meta_info"]):
        print(f"{what}: tokens {span.start} to {span.end} by {span.version}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.engine")
    parser.add_argument("--model-path", required=True, help="the checkpoint to begin with")
    parser.add_argument("--new", required=True, help="the one to change to, and back")
    options = parser.parse_args()

    engine = sglang.Engine(
        model_path=options.model_path, weight_version="old", max_total_tokens=16384
    )
    try:
        update_from_another_thread(engine, options.new, "new")
        engine.loop.run_until_complete(update_from_the_loop(engine, options.model_path, "old"))
    finally:
        engine.shutdown()


# the engine's processes import this file, too
if __name__ == "__main__":
    main()
