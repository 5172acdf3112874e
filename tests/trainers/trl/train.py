"""A training by TRL's ``AsyncGRPOTrainer``, in TRL's environment: ``train.py SETTINGS``.

``SETTINGS`` is JSON, see ``Settings``. ``summary.json`` in the output folder has the trainer's own
account at the end.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

SYNCED = "policy.safetensors"
SCORES = "scores.jsonl"
SUMMARY = "summary.json"
BATCH, GENERATIONS = 8, 4


@dataclass
class Settings:
    url: str
    model: str
    output: str
    steps: int
    tokens: int
    # rank of the adapter; 0 trains all weights
    rank: int
    # word of each prompt's only token
    words: list[str]
    # whether to go on from the last checkpoint in the output folder
    resume: bool


class Reward:
    """The share of even token ids. Each completion is written into a file with its reward."""

    __name__ = "even"

    def __init__(self, file: str) -> None:
        self._file = file

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
        with open(self._file, "a") as file:
            for ids, reward in zip(completion_ids, rewards, strict=True):
                print(json.dumps({"token_ids": ids, "reward": reward}), file=file)
        return rewards


class SavesPolicy(TrainerCallback):
    """Writes the weights before TRL's own callbacks send them."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        save_file(model.state_dict(), self._file)

    def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        save_file(model.state_dict(), self._file)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Do what TRL's flash attention kernel does, which needs CUDA.

    ``query`` has shape (tokens, heads, dimension). Each segment attends to a path, whose last keys
    are its own.
    """
    outputs = []
    for segment in range(len(starts_q) - 1):
        q = query[starts_q[segment] : starts_q[segment + 1]].transpose(0, 1)
        k, v = (
            each[starts_k[segment] : starts_k[segment + 1]].transpose(0, 1) for each in (key, value)
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril(k.shape[1] - q.shape[1])
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


def main(settings: Settings) -> None:
    # these two ask for CUDA: TRL's attention, and the name of the GPU
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    output = Path(settings.output)
    adapter = None
    if settings.rank:
        adapter = LoraConfig(
            r=settings.rank, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
        )
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    # TRL knows those of some chat templates, and refuses to guess others
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {}}}
    prompts = [[{"role": "user", "content": word}] for word in settings.words]
    trainer = AsyncGRPOTrainer(
        model=settings.model,
        reward_funcs=Reward(str(output / SCORES)),
        args=AsyncGRPOConfig(
            output_dir=settings.output,
            vllm_server_base_url=settings.url,
            max_steps=settings.steps,
            per_device_train_batch_size=BATCH,
            num_generations=GENERATIONS,
            max_completion_length=settings.tokens,
            token_budget=0,
            learning_rate=1e-2,
            dtype="float32",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_steps=1,
            save_total_limit=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[SavesPolicy(output / SYNCED)],
        peft_config=adapter,
    )
    trainer.train(resume_from_checkpoint=settings.resume)
    summary = {
        "syncs": trainer.model_version,
        "sync_is_by_adapter": trainer._lora_sync,
        "log": trainer.state.log_history,
    }
    (output / SUMMARY).write_text(json.dumps(summary))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Settings(**json.loads(sys.argv[1])))
