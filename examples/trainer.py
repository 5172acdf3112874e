"""Train a model on a text, and serve every training step while requests run.

python -m examples.trainer --url http://localhost:30000 --model-path /ckpt/step-0

The server may be busy meanwhile: no request ends, and each token is labelled with its step. The
loss here is for predicting the text; replace it by your own.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_inflight.client import Client, Sender


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.trainer")
    parser.add_argument("--url", default="http://localhost:30000", help="the server")
    parser.add_argument("--model-path", required=True, help="the checkpoint that it serves")
    parser.add_argument("--text", default="The quick brown fox jumps over the lazy dog.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl, if we have a GPU of our own"
    )
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype="auto").to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.model_path)
    text = tokenizer(options.text, return_tensors="pt")["input_ids"].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)

    with Client(options.url) as client, Sender(client, backend=options.backend) as sender:
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            loss = model(text, labels=text).loss
            loss.backward()
            optimizer.step()
            receipt = sender.send(model.named_parameters(), weight_version=f"step-{step}")
            print(
                f"{receipt['weight_version']}: loss {loss.item():.3f}, {receipt['bytes']} bytes, "
                f"staged in {receipt['staged_s']:.2f} s, held for {receipt['stall_ms']:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
