"""verl, whole, on a server of this package: its trainers, and its server under an update."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from harness import marker
from tests.support.large_marker import LargeMarker
from tests.trainers.verl.process import run
from tests.trainers.verl.settings import HERE, RAY, TOKENS, overrides

STEPS = 4
IN_FLIGHT = {"SGLANG_INFLIGHT_TRANSPARENT": "1"}
# a session without all tensors is refused
WHOLE = {"SGLANG_INFLIGHT_SESSIONS": "whole"}
LOADER = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"
VOCAB = 8192
WORDS = 1000
# tokens that verl's agent loop for Qwen needs
SPECIAL = ["\n", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)

pytestmark = pytest.mark.timeout(1600)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model with random weights, its tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("task")
    shape = {k: v for k, v in marker.CONFIG.items() if k not in ("architectures", "torch_dtype")}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, "vocab_size": VOCAB}))
    model.float().save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        bos_token="t1",
        eos_token="t2",
        pad_token="t3",
        chat_template=CHAT,
    ).save_pretrained(folder / "model")
    Dataset.from_list([_row(index) for index in range(64)]).to_parquet(folder / "prompts.parquet")
    return folder


def _row(index: int) -> dict[str, Any]:
    words = " ".join(f"t{10 + (7 * index + each) % (WORDS - 10)}" for each in range(5))
    return {
        "data_source": "even numbers",
        "prompt": [{"role": "user", "content": words}],
        "reward_model": {"style": "rule", "ground_truth": "even"},
        "extra_info": {"index": index},
    }


def test_trainer_trains_to_its_end(task: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    given = overrides(
        task / "model",
        data__train_files=task / "prompts.parquet",
        data__val_files=task / "prompts.parquet",
        trainer__total_training_steps=STEPS,
        trainer__default_local_dir=tmp_path / "checkpoints",
        hydra__run__dir=tmp_path / "hydra",
    )
    given += [f"++ray_kwargs.ray_init.{name}={value}" for name, value in RAY.items()]
    run(
        ["-m", "verl.trainer.main_ppo", *given],
        tmp_path / "verl.log",
        {"VERL_FILE_LOGGER_PATH": str(metrics)},
    )
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in (step["data"] for step in steps):
        assert math.isfinite(step["actor/grad_norm"])
        assert step["actor/grad_norm"] > 0, step
        assert step["training/rollout_probs_diff_valid"] == 1
        difference = step["training/rollout_probs_diff_max"]
        # probabilities by the server, and by the trainer's model with its present weights
        if step["training/off_policy/trajectory_staleness_worst/max"] == 0:
            assert difference < 1e-7, step
        else:
            assert difference > 1e-7, step


def expect_versions(
    completions: list[dict[str, Any]], *versions: int, in_flight: bool = False
) -> None:
    """Check that each token is of one of ``versions``, in this order, and that none is lost."""
    order = [marker.token(version) for version in versions]
    for completion in completions:
        tokens = completion["tokens"]
        assert len(tokens) == len(completion["log_probs"]) == TOKENS
        made = [order.index(token) for token in tokens]
        assert made == sorted(made)
        assert marker.token(completion["last"]) == tokens[-1]
        # in flight the commit ends requests, and verl's adapter has named the next step before it
        assert marker.token(completion["first"]) == tokens[-1 if in_flight else 0]
    assert {token for completion in completions for token in completion["tokens"]} == set(order)


@pytest.mark.parametrize(
    ("releases_memory", "env", "loader"),
    [
        pytest.param(True, {}, LOADER, id="as_it_is"),
        pytest.param(False, IN_FLIGHT | WHOLE, None, id="in_flight"),
    ],
)
def test_updates_and_a_killed_trainer_lose_no_token(
    tmp_path: Path, releases_memory: bool, env: dict[str, str], loader: str | None
) -> None:
    shape = LargeMarker(vocab=VOCAB, heads=marker.HEADS, kv_heads=marker.KV_HEADS, head_dim=16)
    file = tmp_path / "outcome.json"
    given = overrides(
        shape.build(tmp_path / "model", 0),
        releases_memory=releases_memory,
        data__max_response_length=2 * TOKENS,
    )
    if loader is not None:
        given.append(
            f"+actor_rollout_ref.rollout.engine_kwargs.sglang.custom_weight_loader=[{loader}]"
        )
    run(["-m", f"{HERE}.rounds", str(file), *given], tmp_path / "verl.log", env)
    outcome = json.loads(file.read_text())
    completions, epochs, in_flight = outcome["completions"], outcome["epochs"], bool(env)
    expect_versions(completions["update 1"], 0, 1, in_flight=in_flight)
    expect_versions(completions["update 2"], 1, 2, in_flight=in_flight)
    expect_versions(completions["death"], 2, in_flight=in_flight)
    expect_versions(completions["return"], 2, 4, in_flight=in_flight)
    if loader is not None:
        expect_versions(completions["delta"], 4, 5)
    if in_flight:
        # one commit an update, and none of the dead trainer's pieces
        assert [after - before for before, after in itertools.pairwise(epochs)] == [1, 1, 1]
        assert "lm_head.weight" in outcome["refusal"]
    else:
        assert epochs == sorted(set(epochs))
        assert outcome["refusal"] == ""
