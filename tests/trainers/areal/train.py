"""AReaL's own trainer, as a process of its Python: ``python -m tests.trainers.areal.train ORDER``.

``ORDER`` is an ``Order`` as JSON. The process runs AReaL's ``PPOTrainer`` on a CPU: its FSDP actor,
its rollouts with staleness control, its updates. It notes what the servers answered and what was
trained on, in the order's folder, as one JSON object a line.
"""

from __future__ import annotations

import contextvars
import json
import os
import signal
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# the second is AReaL's word for broadcasts, which use gloo on a CPU
Mode = Literal["disk", "xccl"]

GENERATIONS, BATCHES, VERSIONS = "generations.jsonl", "batches.jsonl", "versions.jsonl"

# one entry for each answer of a server to the running call of agenerate
_answers: contextvars.ContextVar[list[dict[str, Any]]] = contextvars.ContextVar("answers")


@dataclass(frozen=True)
class Order:
    # a checkpoint: weights at the start, and the tokenizer
    model: str
    # each as host:port
    servers: list[str]
    # takes AReaL's files and our notes
    folder: str
    mode: Mode
    # updates; the process ends after the last one
    steps: int
    max_new_tokens: int
    # each step's weights are the marker's next version, in place of a step of the optimizer
    marker: bool = False
    # the process kills itself in the middle of this update, counted from 1
    dies_in: int | None = None
    batch_size: int = 4
    n_samples: int = 2
    max_staleness: int = 1


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
) -> float:
    """Return the share of even tokens, which differs among the samples of a prompt."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


def prompts(count: int) -> list[dict[str, Any]]:
    """Return data of RLVRWorkflow; each prompt is another word, which names it."""
    return [
        {"messages": [{"role": "user", "content": f"t{300 + index} t7 t8 t9"}]}
        for index in range(count)
    ]


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    os.environ |= {
        # the trainer is one process and finds its servers below, instead of starting workers
        "AREAL_SPMD_MODE": "1",
        "AREAL_LLM_SERVER_ADDRS": ",".join(order.servers),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    from areal import PPOTrainer
    from areal.utils import name_resolve, names
    from areal.utils.network import find_free_ports
    from datasets import Dataset

    os.environ["MASTER_PORT"] = str(find_free_ports(1)[0])
    folder = Path(order.folder)
    config = _config(order)
    # AReaL's launchers do both: names of a killed run would be answers of this one
    name_resolve.reconfigure(config.cluster.name_resolve)
    name_resolve.clear_subtree(names.trial_root(config.experiment_name, config.trial_name))
    _note_answers(folder / GENERATIONS)
    trainer = PPOTrainer(
        config, train_dataset=Dataset.from_list(prompts(order.batch_size * (order.steps + 20)))
    )
    actor = trainer.actor
    _note_versions(actor, folder / VERSIONS)
    _note_batches(actor, folder / BATCHES)
    if order.marker:
        actor.ppo_update = lambda _: _load_marker(actor, actor.get_version() + 1)
    if order.dies_in is not None:
        _die_in(order.dies_in, order)
    trainer.train(
        workflow="areal.workflow.rlvr.RLVRWorkflow",
        workflow_kwargs={
            "reward_fn": "tests.trainers.areal.train.reward",
            "gconfig": config.gconfig,
            "tokenizer": order.model,
        },
    )
    trainer.close()


def _config(order: Order) -> Any:
    from areal.api.cli_args import (
        ClusterSpecConfig,
        GenerationHyperparameters,
        InferenceEngineConfig,
        NameResolveConfig,
        OptimizerConfig,
        PPOActorConfig,
        PPOConfig,
        RecoverConfig,
        SaverConfig,
        SGLangConfig,
        StatsLoggerConfig,
        TrainDatasetConfig,
    )

    run = {"experiment_name": "inflight", "trial_name": "areal"}
    files = {**run, "fileroot": order.folder}
    return PPOConfig(
        **run,
        total_train_epochs=1,
        total_train_steps=order.steps,
        tokenizer_path=order.model,
        cluster=ClusterSpecConfig(
            fileroot=order.folder,
            name_resolve=NameResolveConfig(nfs_record_root=f"{order.folder}/names"),
        ),
        train_dataset=TrainDatasetConfig(
            path="unused", type="rl", batch_size=order.batch_size, shuffle=False, num_workers=0
        ),
        gconfig=GenerationHyperparameters(
            n_samples=order.n_samples,
            max_new_tokens=order.max_new_tokens,
            temperature=1.0,
            greedy=order.marker,
            ignore_eos=True,
        ),
        rollout=InferenceEngineConfig(
            **run,
            fileroot=order.folder,
            backend=f"sglang:d{len(order.servers)}",
            max_head_offpolicyness=order.max_staleness,
            consumer_batch_size=order.batch_size,
            # so that updates come while rollouts are at different tokens
            max_concurrent_rollouts=order.batch_size + 2,
            request_timeout=120,
        ),
        actor=PPOActorConfig(
            **run,
            backend="fsdp:d1",
            path=order.model,
            attn_impl="sdpa",
            dtype="float32",
            optimizer=OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0),
            weight_update_mode=order.mode,
            kl_ctl=0.0,
            ppo_n_minibatches=1,
            use_decoupled_loss=True,
        ),
        sglang=SGLangConfig(model_path=order.model),
        saver=SaverConfig(**files),
        recover=RecoverConfig(**files, mode="on", freq_steps=1),
        stats_logger=StatsLoggerConfig(**files),
    )


def _note_answers(file: Path) -> None:
    """Note each call of AReaL's ``agenerate``: its answer, and each server's part in it."""
    from areal.engine.sglang_remote import SGLangBackend
    from areal.infra.remote_inf_engine import RemoteInfEngine

    parse, agenerate = SGLangBackend.parse_generation_response, RemoteInfEngine.agenerate

    def parse_and_note(self: Any, response: dict[str, Any]) -> Any:
        meta = response["meta_info"]
        _answers.get().append(
            {
                "tokens": response["output_ids"],
                "weight_versions": meta["weight_versions"],
                "kv_versions": meta["kv_versions"],
                "end": meta["finish_reason"]["type"],
            }
        )
        return parse(self, response)

    async def agenerate_and_note(self: Any, request: Any) -> Any:
        _answers.set([])
        response = await agenerate(self, request)
        _note(
            file,
            prompt=response.input_tokens,
            tokens=response.output_tokens,
            versions=response.output_versions,
            logprobs=response.output_logprobs,
            server=self.rid_to_address[request.rid],
            answers=_answers.get(),
        )
        return response

    SGLangBackend.parse_generation_response = parse_and_note
    RemoteInfEngine.agenerate = agenerate_and_note


def _note_batches(actor: Any, file: Path) -> None:
    prepare = actor.prepare_batch

    def prepare_and_note(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        sequences = [
            [token for token, seen in zip(row, mask, strict=True) if seen]
            for trajectory in batch
            for row, mask in zip(
                trajectory["input_ids"].tolist(),
                trajectory["attention_mask"].tolist(),
                strict=True,
            )
        ]
        _note(file, version=actor.get_version(), sequences=sequences)
        return batch

    actor.prepare_batch = prepare_and_note


def _note_versions(actor: Any, file: Path) -> None:
    """Note each update that the trainer has completed, and keep its weights as a checkpoint.

    AReaL's own saver needs triton, which weighs a gigabyte.
    """
    from areal.api import SaveLoadMeta

    update = actor.update_weights

    def update_and_note(meta: Any) -> None:
        update(meta)
        kept = str(file.parent / f"v{meta.version}")
        actor.save(SaveLoadMeta(path=kept, weight_format="hf", with_optim=False))
        _note(file, version=meta.version)

    actor.update_weights = update_and_note


def _note(file: Path, **what: Any) -> None:
    with file.open("a") as sink:
        print(json.dumps(what), file=sink)


def _load_marker(actor: Any, version: int) -> None:
    import torch

    from harness import marker

    parameters = dict(actor.model.named_parameters())
    with torch.no_grad():
        for name, tensor in marker.tensors(version).items():
            parameters[name].to_local().copy_(tensor)


def _die_in(count: int, order: Order) -> None:
    """Kill this process in its ``count``-th update, when the servers wait for weights."""
    import torch.distributed as dist
    from areal.engine.fsdp_engine import FSDPEngine
    from areal.engine.sglang_remote import RemoteSGLangEngine

    def die(*_: Any, **__: Any) -> None:
        if order.mode == "xccl":
            _wait_until_staging(order.servers)
        os.kill(os.getpid(), signal.SIGKILL)

    seen = 0

    def update(self: Any, *args: Any) -> Any:
        nonlocal seen
        seen += 1
        answer = begin(self, *args)
        if seen == count:
            # the next thing that each of the two ways does
            FSDPEngine._save_model_to_hf = die
            dist.broadcast = die
        return answer

    name = f"update_weights_from_{'disk' if order.mode == 'disk' else 'distributed'}"
    begin = getattr(RemoteSGLangEngine, name)
    setattr(RemoteSGLangEngine, name, update)


def _wait_until_staging(servers: list[str]) -> None:
    for server in servers:
        while True:
            with urllib.request.urlopen(f"http://{server}/inflight/status") as answer:
                ranks = json.load(answer)["ranks"]
            if all(rank["staging"]["state"] != "empty" for rank in ranks):
                break
            time.sleep(0.05)


if __name__ == "__main__":
    main()
