"""A user's calls to ``sglang.Engine``, in a process of their own.

``python -m tests.support.engine_calls CHECKPOINTS ANSWERS`` writes the results as JSON. This is a
script because an engine's shutdown kills every child of its process, test servers included.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import sglang

from harness import marker
from harness.server import free_port
from sglang_inflight.client import digests
from sglang_inflight.vocabulary.errors import Refused
from tests.support.load import ENDLESS

# tokens of a request under several calls; the engine of the test has slow steps
TOKENS = 200
SAMPLING = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
# ended by something else
ENDLESS_SAMPLING = {**SAMPLING, "max_new_tokens": ENDLESS}

# arguments of a wrong type or range, for each method
NONSENSE: dict[str, dict[str, Any]] = {
    "pause_generation": {"mode": "nonsense"},
    "continue_generation": {"torch_empty_cache": "nonsense"},
    "update_weights_from_disk": {"model_path": 5},
    "update_weights_from_tensor": {"named_tensors": [], "on_busy": "nonsense"},
    "update_weights_from_distributed": {"names": "a", "dtypes": [], "shapes": []},
    "update_weights_from_ipc": {"zmq_handles": []},
    "begin_weight_update": {"selector": "nonsense"},
    "seal_weight_update": {"session_id": 5},
    "end_weight_update": {"kv_cache": "nonsense"},
    "abort_weight_update": {"session_id": ""},
    "rollback_weights": {"flush_cache": 5},
    "init_weights_update_group": {
        "master_address": "localhost", "master_port": 0, "rank_offset": 1, "world_size": 2,
    },
    "destroy_weights_update_group": {"group_name": 5},
    "release_memory_occupation": {"tags": 5},
    "resume_memory_occupation": {"tags": 5},
}  # fmt: skip


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
        expected_digests=digests(marker.tensors(2)),
    )
    answers["altered"] = said(
        engine.update_weights_from_tensor,
        list(marker.tensors(1).items()),
        non_blocking=True,
        expected_digests=digests(marker.tensors(2)),
    )
    answers["continue"] = engine.continue_generation()
    answers["distributed"] = update_from_trainer(engine, 3)
    answers["rollback"] = engine.rollback_weights()
    try:
        engine.update_weights_from_disk("/nowhere", non_blocking=True)
    except Refused as error:
        answers["refused"] = str(error)
    answers["in flight"] = generating.result()

    answers["signatures"] = {
        name: [str(inspect.signature(method)), inspect.getdoc(method)]
        for name in (*NONSENSE, "is_paused", "inflight_status", "flush_cache")
        for method in (getattr(engine, name), getattr(engine, f"async_{name}"))
    }
    answers["nonsense"] = {
        name: said(getattr(engine, name), **wrong) for name, wrong in NONSENSE.items()
    }
    answers["unknown"] = said(engine.pause_generation, colour="red")
    answers["after nonsense"] = engine.is_paused()

    answers["async"] = engine.loop.run_until_complete(use_async(engine, checkpoints))

    answers["moved"] = [
        engine.release_memory_occupation(tags=["weights"], keep_weights="host"),
        engine.resume_memory_occupation(tags=["weights"]),
    ]
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
    # SGLang checks these types itself, though no route passes them
    loose: dict[str, Any] = {"temperature": 0, "max_new_tokens": 3.0, "top_k": 1.0, "ignore_eos": 1}
    loose |= {"logit_bias": {5: 1.0}, "custom_params": {"a": {"b": [{"c": None}]}}}
    answers["loose"] = engine.generate(input_ids=[9], sampling_params=loose, return_logprob=1)
    answers["too loose"] = said(
        engine.generate, input_ids=[9], sampling_params={"max_new_tokens": 1.5}
    )
    answers["contract"] = [
        engine.generate(
            None,
            {"max_new_tokens": 1},
            input_ids=[9],
            exact_weight_version=engine.inflight_status()["weight_version"],
        ),
        said(engine.generate, input_ids=[9], min_epoch=10**6, version_timeout_s=0),
        said(engine.generate, input_ids=[9], min_epoch=-1),
        said(engine.wait_for_epoch, 10**6, timeout_s=0),
        engine.wait_for_epoch(1),
    ]
    engine.pause_generation("in_place", new_requests="reject")
    answers["rejected"] = said(engine.generate, input_ids=[9])
    engine.continue_generation()
    answers["last"] = engine.generate(
        input_ids=[9], sampling_params={"temperature": 0, "max_new_tokens": 3}
    )["output_ids"]
    return answers


def said(call: Callable[..., object], *args: Any, **named: Any) -> str:
    """Return the error raised by a call."""
    try:
        return f"{call(*args, **named)!r} was answered"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def async_said(call: Awaitable[object]) -> str:
    try:
        return f"{await call!r} was answered"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def use_async(engine: Any, checkpoints: Path) -> dict[str, Any]:
    in_the_loop = [
        said(engine.pause_generation),
        said(engine.generate, input_ids=[9], sampling_params=SAMPLING),
        said(engine.flush_cache),
    ]
    paused_then = await engine.async_is_paused()
    flushed = await engine.async_flush_cache()
    generating = asyncio.ensure_future(
        engine.async_generate(input_ids=[21, 6, 7], sampling_params=SAMPLING)
    )
    while not (await engine.async_inflight_status())["running"]:
        await asyncio.sleep(0.01)
    receipt = await engine.async_update_weights_from_disk(
        str(checkpoints / "v4"), non_blocking=True, flush_cache=True, weight_version="v4"
    )
    paused = await engine.async_pause_generation("retract")
    moved = [
        await engine.async_release_memory_occupation(["kv_cache"]),
        await engine.async_resume_memory_occupation(["kv_cache"]),
    ]
    await engine.async_continue_generation()
    output = await generating
    return {
        "in the loop": in_the_loop,
        "paused then": paused_then,
        "flushed": flushed.success,
        "receipt": receipt,
        "paused": paused,
        "moved": moved,
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
        # unnamed, so not a piece of the open session; and the turn is taken
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


async def use_beside(first: Any, model: Path) -> dict[str, Any]:
    """Use an engine of two ranks under ``asyncio.run``, beside an engine of one rank."""
    second = sglang.Engine(
        model_path=str(model),
        weight_version="v0",
        tp_size=2,
        max_total_tokens=16384,
        max_running_requests=8,
    )
    answers: dict[str, Any] = {}
    statuses = [
        await asyncio.to_thread(first.inflight_status),
        await second.async_inflight_status(),
    ]
    answers["ranks"] = [len(status["ranks"]) for status in statuses]
    answers["flushed"] = (await asyncio.to_thread(first.flush_cache)).success

    answers["in the loop"] = said(second.pause_generation)
    answers["not paused"] = await second.async_is_paused()
    await asyncio.to_thread(second.pause_generation, "in_place")
    answers["paused"] = await second.async_is_paused()
    await asyncio.to_thread(second.continue_generation)
    answers["elsewhere"] = await asyncio.to_thread(
        lambda: said(asyncio.run, second.async_is_paused())
    )
    # a shutdown ends the ranks of every engine in the process; SGLang's watchdog of the first
    # engine would then end the process
    first.tokenizer_manager._subprocess_watchdog.stop()
    answers["ended"] = await shut_down_under_calls(second)
    return answers


async def shut_down_under_calls(engine: Any) -> dict[str, Any]:
    """Shut down under waiting calls in threads and on the loop, and return all calls' ends."""
    begun = threading.Event()

    def stream() -> Any:
        reasons = []
        for chunk in engine.generate(input_ids=[11], sampling_params=ENDLESS_SAMPLING, stream=True):
            reasons.append(chunk["meta_info"]["finish_reason"])
            begun.set()
        return reasons[-1]

    # this session stays open, so another caller's update waits for its turn
    await engine.async_begin_weight_update(non_blocking=True)
    update = {"named_tensors": list(marker.tensors(1).items()), "non_blocking": True}
    with ThreadPoolExecutor() as threads:
        streaming = threads.submit(stream)
        updating = threads.submit(said, engine.update_weights_from_tensor, **update)
        generating = asyncio.ensure_future(
            async_said(engine.async_generate(input_ids=[12], sampling_params=ENDLESS_SAMPLING))
        )
        async_updating = asyncio.ensure_future(
            async_said(engine.async_update_weights_from_tensor(**update))
        )
        await asyncio.to_thread(begun.wait, 60)
        while (await engine.async_inflight_status())["running"] < 2:
            await asyncio.sleep(0.01)
        pausing = asyncio.ensure_future(async_said(engine.async_pause_generation("wait")))
        while (await engine.async_inflight_status())["state"] != "draining":
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown)
        return {
            "stream": await asyncio.wrap_future(streaming),
            "update": await asyncio.wrap_future(updating),
            "async update": await async_updating,
            "async generate": await generating,
            "async pause": await pausing,
            "later": await asyncio.to_thread(said, engine.pause_generation),
            "later generate": await async_said(
                engine.async_generate(input_ids=[9], sampling_params=SAMPLING)
            ),
        }


def update_from_trainer(engine: Any, version: int) -> Any:
    """Send from a thread: the engine's ranks are processes of their own."""
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


def serve(engine: Any) -> dict[str, Any]:
    """Import SGLang's HTTP app after the engine's start, like Ray Serve."""
    from sglang.srt.entrypoints import http_server

    http_server.set_global_state(
        http_server._GlobalState(
            tokenizer_manager=engine.tokenizer_manager,
            template_manager=engine.template_manager,
            scheduler_info={},
        )
    )

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=http_server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            paused = await client.post("/pause_generation", json={"mode": "in_place"})
            status = await client.get("/inflight/status")
            continued = await client.post("/continue_generation", json={})
        return {
            "paused": paused.json(),
            "status": status.json(),
            "continued": continued.json(),
        }

    answers: dict[str, Any] = engine.loop.run_until_complete(ask())
    return answers


def main() -> None:
    checkpoints, answers = Path(sys.argv[1]), Path(sys.argv[2])
    engine = sglang.Engine(
        model_path=str(checkpoints / "v0"),
        weight_version="v0",
        max_total_tokens=16384,
        max_running_requests=8,
    )
    try:
        played = play(engine, checkpoints)
        played["served"] = serve(engine)
        # must be last: its shutdown ends the ranks of every engine in the process
        played["beside"] = asyncio.run(use_beside(engine, checkpoints / "v0"))
        answers.write_text(json.dumps(played))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
