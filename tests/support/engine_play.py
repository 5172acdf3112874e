"""What a user does with ``sglang.Engine``, in a process of its own.

``python -m tests.support.engine_play CHECKPOINTS ANSWERS`` writes what came of it as JSON.
It is a script because an engine's end kills every child of its process, a test server too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import sglang

from sglang_inflight.errors import Refused
from tests.support import marker
from tests.support.server import free_port

TOKENS = 600
SAMPLING = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


class Generating:
    """A thread that generates with the engine while the main thread calls it."""

    def __init__(self, engine: Any, first_token: int) -> None:
        self._engine = engine
        self._first_token = first_token
        self._begun = threading.Event()
        self._last: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._generate)
        self._thread.start()
        self._begun.wait(60)

    def _generate(self) -> None:
        chunks = self._engine.generate(
            input_ids=[self._first_token, 6, 7], sampling_params=SAMPLING, stream=True
        )
        for self._last in chunks:
            self._begun.set()

    def result(self) -> dict[str, Any]:
        self._thread.join(120)
        return {
            "tokens": self._last["output_ids"],
            "spans": self._last["meta_info"]["weight_versions"],
        }


def play(engine: Any, checkpoints: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    generating = Generating(engine, 11)
    answers["disk"] = engine.update_weights_from_disk(
        str(checkpoints / "v1"), non_blocking=True, flush_cache=False, weight_version="v1"
    )
    answers["pause"] = engine.pause_generation("in_place")
    answers["tensor"] = engine.update_weights_from_tensor(
        list(marker.tensors(2).items()),
        non_blocking=True,
        flush_cache=False,
        weight_version="v2",
    )
    answers["continue"] = engine.continue_generation()
    answers["distributed"] = update_from_trainer(engine, 3)
    answers["rollback"] = engine.rollback_weights()
    try:
        engine.update_weights_from_disk("/nowhere", non_blocking=True)
    except Refused as error:
        answers["refused"] = str(error)
    answers["in flight"] = generating.result()

    answers["async"] = engine.loop.run_until_complete(use_async(engine, checkpoints))

    answers["blocking disk"] = engine.update_weights_from_disk(str(checkpoints / "v5"))
    engine.begin_weight_update()
    engine.update_weights_from_tensor(list(marker.tensors(1).items()))
    answers["sealed"] = engine.seal_weight_update()
    engine.abort_weight_update()
    answers["blocking session"] = [
        engine.begin_weight_update(),
        engine.update_weights_from_tensor(list(marker.tensors(0).items())),
        engine.end_weight_update(),
    ]
    answers["named session"] = use_a_named_session(engine)
    answers["blocking failure"] = engine.update_weights_from_disk("/nowhere")
    answers["without a session"] = engine.update_weights_from_tensor([])
    answers["last"] = engine.generate(
        input_ids=[9], sampling_params={"temperature": 0, "max_new_tokens": 3}
    )["output_ids"]
    return answers


async def use_async(engine: Any, checkpoints: Path) -> dict[str, Any]:
    generating = asyncio.ensure_future(
        engine.async_generate(input_ids=[21, 6, 7], sampling_params=SAMPLING)
    )
    while not (await engine.async_inflight_status())["running"]:
        await asyncio.sleep(0.01)
    receipt = await engine.async_update_weights_from_disk(
        str(checkpoints / "v4"), non_blocking=True, flush_cache=True, weight_version="v4"
    )
    paused = await engine.async_pause_generation("retract")
    await engine.async_continue_generation()
    output = await generating
    return {
        "receipt": receipt,
        "paused": paused,
        "tokens": output["output_ids"],
        "spans": output["meta_info"]["weight_versions"],
    }


def use_a_named_session(engine: Any) -> dict[str, Any]:
    begun = engine.begin_weight_update(non_blocking=True, lease_s=60)
    name = {"session_id": begun["session_id"]}
    tensors = list(marker.tensors(0).items())
    engine.update_weights_from_tensor(tensors, non_blocking=True, weight_version="named", **name)
    answers = {"renewed": engine.begin_weight_update(non_blocking=True, lease_s=30, **name)}
    try:
        # no piece of the session, and it is not its turn
        engine.update_weights_from_tensor(tensors, non_blocking=True, on_busy="refuse")
    except Refused as error:
        answers["stranger"] = str(error)
    engine.seal_weight_update(**name)
    answers["end"] = engine.end_weight_update(non_blocking=True, **name)
    try:
        engine.abort_weight_update(**name)
    except Refused as error:
        answers["ended"] = str(error)
    return {"begun": begun, **answers}


def update_from_trainer(engine: Any, version: int) -> Any:
    """The trainer's end is a thread here: the engine's ranks are processes of their own."""
    import torch.distributed as dist
    from sglang.srt.utils import init_custom_process_group

    port, weights = free_port(), marker.tensors(version)

    def send() -> None:
        group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name="weight_update_group",
        )
        for tensor in weights.values():
            dist.broadcast(tensor, src=0, group=group)

    trainer = threading.Thread(target=send)
    trainer.start()
    assert engine.init_weights_update_group(
        "127.0.0.1", port, 1, 2, "weight_update_group", "gloo"
    ) == (True, "Success")
    receipt = engine.update_weights_from_distributed(
        list(weights),
        ["bfloat16"] * len(weights),
        [list(tensor.shape) for tensor in weights.values()],
        non_blocking=True,
        flush_cache=False,
        weight_version=f"v{version}",
    )
    trainer.join(60)
    return receipt


def main() -> None:
    checkpoints, answers = Path(sys.argv[1]), Path(sys.argv[2])
    engine = sglang.Engine(
        model_path=str(checkpoints / "v0"),
        weight_version="v0",
        max_total_tokens=16384,
        max_running_requests=8,
    )
    try:
        answers.write_text(json.dumps(play(engine, checkpoints)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
