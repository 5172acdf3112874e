"""The calls of TRL's ``VLLMClient``, in TRL's environment: ``client_calls.py SETTINGS``.

``SETTINGS`` is JSON, see ``main``. The answers are written as JSON into the file ``output``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trl.generation.vllm_client import VLLMClient


def main(
    url: str, output: str, prompts: list[list[int]], text: str, top: int, policies: list[str]
) -> None:
    """Generate and score, then send the weights in each file of ``policies``, and score again.

    The weights of the first file are sent one by one, and those of the others in one call.
    """
    client = VLLMClient(base_url=url)
    sampling: dict[str, Any] = {"max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}
    generated = client.generate(prompts, n=2, logprobs=0, **sampling)
    answers: dict[str, Any] = {
        "generate": generated,
        "chat": client.chat([[{"role": "user", "content": text}]], n=2, logprobs=2, **sampling),
    }
    sequences = [
        prompts[index // 2] + tokens for index, tokens in enumerate(generated["completion_ids"])
    ]
    lengths = [len(prompts[index // 2]) for index in range(len(sequences))]

    def score() -> Any:
        return client.get_sequence_logprobs(sequences, lengths, top_logprobs=top, chunk_size=3)

    answers |= {"sequences": sequences, "lengths": lengths, "scores": [score()]}
    # without an index no function of CUDA is called
    client.init_communicator(device="cuda")
    for number, file in enumerate(policies):
        weights = load_file(file)
        if number == 0:
            with client.weight_update():
                for name, tensor in weights.items():
                    client.update_named_param(name, tensor)
        else:
            metadata = [
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                for name, tensor in weights.items()
            ]
            client.update_named_params(metadata, iter(weights.items()))
        client.reset_prefix_cache()
        answers["scores"].append(score())
    client.close_communicator()
    Path(output).write_text(json.dumps(answers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**json.loads(sys.argv[1]))
