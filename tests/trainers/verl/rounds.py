"""verl's Ray server, worker, adapter and client, with a marker in place of a training's weights.

python -m tests.trainers.verl.rounds FILE OVERRIDE...

The calls are those of verl's trainer ``colocate_async``. FILE gets the outcome as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import hydra
import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.delta_sync import checksum
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from tests.support.large_marker import LargeMarker
from tests.trainers.verl.settings import RAY, TOKENS

# embeddings and head are two megabytes each, and so three of verl's buckets of one megabyte
MODEL = LargeMarker(vocab=8192, heads=4, kv_heads=2, head_dim=16)
REQUESTS = 6

Method = TypeVar("Method", bound=Callable[..., Any])

SAMPLING = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}


def on_every_worker(*, blocking: bool = True) -> Callable[[Method], Method]:
    """Offer a method to the driver, for all workers of a group."""
    offer: Callable[[Method], Method] = register(Dispatch.ONE_TO_ALL, blocking=blocking)
    return offer


class Trainer(ActorRolloutRefWorker):
    """verl's worker, whose FSDP model takes the weights of a marker's version."""

    @on_every_worker()
    def become(self, version: int) -> None:
        weights = self.actor.engine.module.state_dict()
        with torch.no_grad():
            for name, tensor in MODEL.tensors(version).items():
                weights[name].to_local().copy_(tensor)

    @on_every_worker()
    def process(self) -> int:
        return os.getpid()

    @on_every_worker()
    def halt_before_head(self, reached: str) -> None:
        """Make the next update stop before its last bucket, for ever, and write ``reached``."""
        read = self.actor.engine.get_per_tensor_param

        def halting(*arguments: Any, **keywords: Any) -> Any:
            weights, config = read(*arguments, **keywords)
            return _halting(weights, Path(reached)), config

        self.actor.engine.get_per_tensor_param = halting

    @on_every_worker(blocking=False)
    async def send_delta(self, old: int, new: int, step: int) -> None:
        """Send what differs between two versions, for verl's own loader."""
        await self.rollout.update_weights(
            iter([(_delta(old, new), True)]), global_steps=step, wire_format="delta_flush"
        )


def _halting(weights: Iterator[Any], reached: Path) -> Iterator[Any]:
    for name, tensor in weights:
        if name == "lm_head.weight":
            reached.touch()
            time.sleep(3600)
        yield name, tensor


def _delta(old: int, new: int) -> list[tuple[str, torch.Tensor]]:
    """Return a flush of verl's delta engine: manifest, positions as int32, and values."""
    name = "lm_head.weight"
    before, after = (MODEL.tensors(version)[name].float().flatten() for version in (old, new))
    at = (before != after).nonzero().flatten()
    positions, values = at.to(torch.int32).view(torch.uint8), after[at]
    entry = {
        "name": name,
        "dtype": "float32",
        "shape": [MODEL.vocab, len(after) // MODEL.vocab],
        "pos_start": 0,
        "pos_end": len(positions),
        "val_start": 0,
        "val_end": len(values),
    }
    manifest = {
        "encoding": "indices",
        "params": [entry],
        "checksum": checksum(positions, values),
    }
    spec = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)
    return [("__delta_spec__", spec), ("__positions__", positions), ("__values__", values)]


@dataclass
class Completion:
    tokens: list[int]
    log_probs: list[float]
    # verl's own names of the first and the last version
    first: int
    last: int


@dataclass
class Outcome:
    # completions by what happened meanwhile
    completions: dict[str, list[Completion]] = field(default_factory=dict)
    # commits of the server, after each update
    epochs: list[int] = field(default_factory=list)
    # the server's answer to the end of the update whose trainer died
    refusal: str = ""


class Run:
    """One server's actor, and one trainer after the other."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.outcome = Outcome()
        self.pool = RayResourcePool([1], max_colocate_count=2)
        self.group = self._new_trainer()
        self.servers: LLMServerManager
        self.client: FullyAsyncLLMServerClient
        self.manager: CheckpointEngineManager

    def _new_trainer(self) -> RayWorkerGroup:
        worker = RayClassWithInitArgs(
            cls=ray.remote(Trainer), config=self.config.actor_rollout_ref, role="actor_rollout"
        )
        group = RayWorkerGroup(resource_pool=self.pool, ray_cls_with_init=worker, device_name="cpu")
        group.init_model()
        return group

    async def start(self) -> None:
        self.servers = await LLMServerManager.create(self.config, worker_group=self.group)
        self.client = self.servers.get_client(client_cls=FullyAsyncLLMServerClient)
        self._manage()
        await self.manager.sleep_replicas()

    def _manage(self) -> None:
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.manager = CheckpointEngineManager(
            config=engine, actor_wg=self.group, replicas=self.servers.get_replicas()
        )

    def return_as_a_new_trainer(self) -> None:
        self.group = self._new_trainer()
        self._manage()

    def get(self, path: str) -> Any:
        return httpx.get(f"http://{self.servers.get_addresses()[0]}{path}", timeout=60).json()

    def note_epoch(self) -> None:
        self.outcome.epochs.append(self.get("/inflight/status")["epoch"])

    async def update(self, version: int) -> None:
        """Do a step's update, from its first call to its last."""
        await self.manager.abort_replicas()
        await self.manager.sleep_replicas()
        self.group.become(version)
        await self.manager.update_weights(version)
        await self.manager.resume_generation_replicas()
        self.note_epoch()

    async def under_requests(self, name: str, doing: Any) -> None:
        """Await ``doing`` while requests run, and keep their completions."""
        running = [asyncio.create_task(self._generate(number)) for number in range(REQUESTS)]
        while self._running() < REQUESTS:
            await asyncio.sleep(0.05)
        await doing
        self.outcome.completions[name] = await asyncio.gather(*running)

    def _running(self) -> int:
        loads: list[dict[str, int]] = self.get("/v1/loads")["loads"]
        return sum(load["num_running_reqs"] for load in loads)

    async def _generate(self, number: int) -> Completion:
        output = await self.client.generate(
            request_id=uuid4().hex, prompt_ids=[5, 6, 7, 8 + number], sampling_params=dict(SAMPLING)
        )
        fields = output.extra_fields
        return Completion(
            output.token_ids,
            output.log_probs,
            fields["min_global_steps"],
            fields["max_global_steps"],
        )

    async def kill_in_an_update(self, version: int, reached: Path) -> None:
        """Kill the trainer between two buckets of an update, and let requests go on."""
        await self.manager.abort_replicas()
        await self.manager.sleep_replicas()
        self.group.become(version)
        self.group.halt_before_head(str(reached))
        (process,) = self.group.process()
        update = self.group.update_weights(global_steps=version, mode="naive")
        while not reached.exists():
            await asyncio.sleep(0.1)
        os.kill(process, signal.SIGKILL)
        try:
            await asyncio.gather(*update)
        except ray.exceptions.RayActorError:
            pass
        else:
            raise AssertionError("the trainer outlived SIGKILL")
        try:
            await self.manager.resume_kv_cache_replicas()
            await self.manager.resume_generation_replicas()
        except ray.exceptions.RayTaskError as error:
            self.outcome.refusal = str(error.cause)

    async def send_delta(self, old: int, new: int) -> None:
        await self.manager.abort_replicas()
        await asyncio.gather(*self.group.send_delta(old, new, new))
        await self.manager.resume_generation_replicas()
        self.note_epoch()


async def play(run: Run, reached: Path) -> None:
    await run.start()
    run.group.become(0)
    await run.manager.update_weights(0)
    run.note_epoch()
    for version in (1, 2):
        await run.under_requests(f"update {version}", run.update(version))
    await run.under_requests("death", run.kill_in_an_update(3, reached))
    run.return_as_a_new_trainer()
    await run.under_requests("return", run.update(4))
    if run.config.actor_rollout_ref.rollout.engine_kwargs.sglang.get("custom_weight_loader"):
        await run.under_requests("delta", run.send_delta(4, 5))


def main(file: Path, overrides: list[str]) -> None:
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    ray.init(**RAY)
    run = Run(config)
    # asyncio.run() would cancel requests that still run after a failure, and those never end
    asyncio.new_event_loop().run_until_complete(play(run, file.with_suffix(".reached")))
    file.write_text(json.dumps(asdict(run.outcome)))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
