"""A small model to train, and the log-probabilities of its policies by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness import marker

SEED = 7
# weights of this deviation give logits of some units
DEVIATION = 0.2

Weights = Mapping[str, torch.Tensor]


def build(folder: Path) -> Path:
    """Write a float32 model with random weights, and the marker's tokenizer."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(tensor.shape)
        if tensor.dim() == 1
        else torch.randn(tensor.shape, generator=generator) * DEVIATION
        for name, tensor in marker.tensors(0).items()
    }
    return marker.write(folder, weights, marker.CONFIG | {"torch_dtype": "float32"})


class Reference:
    """The model in transformers, in float32, with the weights of any policy."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self._base = {name: t.clone() for name, t in self._model.state_dict().items()}

    def take_weights(self, file: Path) -> None:
        """Take the whole weights in ``file``."""
        self._model.load_state_dict(load_file(file))

    def take_adapter(self, folder: Path) -> None:
        """Take the first weights, with the adapter in PEFT's ``folder`` added."""
        config = json.loads((folder / "adapter_config.json").read_text())
        adapter = load_file(folder / "adapter_model.safetensors")
        weights = dict(self._base)
        for name, down in adapter.items():
            if not name.endswith("lora_A.weight"):
                continue
            up = adapter[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[layer] = weights[layer] + up @ down * (config["lora_alpha"] / config["r"])
        self._model.load_state_dict(weights)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return log-probabilities at temperature 1 of the tokens after each sequence's first one.

        They are float32, of shape (length of the sequence - 1,).
        """
        rows = [torch.tensor(sequence) for sequence in sequences]
        # no token sees the padding after it
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad():
            logits = self._model(ids).logits[:, :-1]
        all_of_them = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [values[: len(row) - 1] for row, values in zip(rows, all_of_them, strict=True)]

    def likeliest(self, sequence: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens after each token of ``sequence`` but the last.

        They are log-probabilities, float32, and token ids, of shape (length - 1, ``count``).
        """
        with torch.no_grad():
            logits = self._model(torch.tensor([sequence])).logits[0, :-1]
        return logits.log_softmax(-1).topk(count)
