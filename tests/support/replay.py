"""Log-probabilities by Hugging Face transformers, for a context with mixed weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Replay:
    """Several versions of a model, taking turns over one KV cache."""

    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        self._models: dict[str, Any] = {
            version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for version, path in checkpoints.items()
        }

    @torch.no_grad()
    def logprobs(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        made_by: Sequence[str],
        kv: Sequence[str],
        since: int = 0,
    ) -> list[float]:
        """Return the log-probability of each token from ``since`` on, by ``made_by``'s version.

        ``kv`` names the version of each position's KV. The last token has none, as no position
        attends to it.
        """
        tokens = [*prompt, *output]
        found: list[float] = []
        cache = DynamicCache()
        begin = 0
        # the forward of the last token before ``since`` gives the first log-probability
        for owner, run in itertools.groupby(kv[: len(prompt) + since - 1]):
            end = begin + len(list(run))
            self._models[owner](torch.tensor([tokens[begin:end]]), past_key_values=cache)
            begin = end
        for position, owner in enumerate(kv[begin:], begin):
            token = torch.tensor([[tokens[position]]])
            following = position + 1 - len(prompt)
            sampler = made_by[following]
            # a forward writes into its cache
            scratch = cache if sampler == owner else copy.deepcopy(cache)
            logits = self._models[sampler](token, past_key_values=scratch).logits[0, -1]
            found.append(logits.log_softmax(-1)[output[following]].item())
            if sampler != owner:
                self._models[owner](token, past_key_values=cache)
        return found
