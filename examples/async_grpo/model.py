"""The model: a Qwen3 of 0.7 million weights, which can count down and guesses what words mean."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from examples.async_grpo import task

NO_TARGET = -100
TEACHING_STEPS = 400
# the last part of the teaching spoils what the first part has taught
GUESSES_FROM = 0.7
KNOWS = 0.15
# a new name for each change of the task or the teaching
FOLDER = "countdown-4-{steps}-{turns}"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": task.VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": task.BEGIN,
    "eos_token_id": task.END,
    "attention_bias": False,
    "dtype": "bfloat16",
}

R = TypeVar("R")
# a prompt and its answer
Row = tuple[list[int], list[int]]
Weights = dict[str, torch.Tensor]


class Base(NamedTuple):
    """The taught model in float32, and the folder of its checkpoint in bfloat16."""

    model: Any
    folder: Path


def of_like_length(
    rows: Sequence[R], *, parts: int, length: Callable[[R], int]
) -> list[Sequence[R]]:
    """Split rows into parts of like length, which need little padding."""
    ordered = sorted(rows, key=length)
    size = math.ceil(len(ordered) / parts)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def pad(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (rows, longest), int64, and a mask of that shape: true in answers."""
    ids = [torch.tensor(prompt + answer) for prompt, answer in rows]
    masks = [torch.tensor([False] * len(prompt) + [True] * len(answer)) for prompt, answer in rows]
    return pad_sequence(ids, batch_first=True), pad_sequence(masks, batch_first=True)


def new_model() -> Any:
    """Return a model with random weights, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**CONFIG)).float()


def served_weights(model: Any) -> Weights:
    """Return a copy of each weight, in the dtype that the server has."""
    return {
        name: weight.detach().to(torch.bfloat16, copy=True)
        for name, weight in model.named_parameters()
    }


def with_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return ``model`` after it took over ``weights``, each converted to its parameter's dtype."""
    model.load_state_dict(weights)
    return model


def teach(
    model: Any,
    *,
    seed: int = 0,
    steps: int,
    turns: int = 1,
    batch: int = 48,
    learning_rate: float = 2e-3,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Teach ``model`` to count and what words mean, and then to guess what words mean.

    A question comes after up to ``turns - 1`` others with their answers.

    So it can learn again what it was taught: reinforcement learning strengthens what is there.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for step in range(steps):
        knows = 1.0 if step < GUESSES_FROM * steps else KNOWS
        rows = []
        for _ in range(batch):
            history = task.history(rng, knows, turns=rng.randrange(turns))
            asked = task.ask_any(rng)
            rows.append((history + asked.prompt, task.guessed_answer(asked, rng, knows)))
        tokens = sum(len(answer) for _, answer in rows)
        optimizer.zero_grad()
        for part in of_like_length(rows, parts=4, length=lambda row: len(row[0] + row[1])):
            ids, is_answer = pad(part)
            targets = ids[:, 1:].masked_fill(~is_answer[:, 1:], NO_TARGET)
            logits = model(input_ids=ids).logits[:, :-1]
            loss = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
            )
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, steps)


def base_model(
    cache: Path, on_step: Callable[[int, int], None], *, steps: int, turns: int = 1
) -> Base:
    """Return the model that ``teach`` makes in ``steps`` steps, made once for a ``cache``."""
    folder = cache / FOLDER.format(steps=steps, turns=turns)
    weights = folder / "float32.pt"
    torch.manual_seed(0)
    model = new_model()
    if weights.exists():
        return Base(with_weights(model, torch.load(weights, weights_only=True)), folder)
    teach(model, steps=steps, turns=turns, on_step=on_step)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(served_weights(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    # last: it says that the others are whole
    partial = weights.with_suffix(".part")
    torch.save(model.state_dict(), partial)
    partial.rename(weights)
    return Base(model, folder)
