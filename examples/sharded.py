"""Train a model that is sharded by FSDP2, and serve every training step while requests run.

torchrun --nproc-per-node 2 -m examples.sharded --url http://localhost:30000 --model-path /ckpt/0

Each process sends its shards straight to the ranks of the servers that use them. Give ``--url`` for
each server of a fleet: all of them change, or none. The loss here is for predicting the text;
replace it by your own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_inflight.client import Fleet, ShardSender


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m examples.sharded")
    parser.add_argument("--url", action="append", required=True, help="a server; give many")
    parser.add_argument("--model-path", required=True, help="the checkpoint that they serve")
    parser.add_argument("--text", default="The quick brown fox jumps over the lazy dog.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype="auto").to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokenizer = AutoTokenizer.from_pretrained(options.model_path)
    text = tokenizer(options.text, return_tensors="pt")["input_ids"].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)

    # rank 0 alone calls the servers
    fleet = Fleet(options.url) if rank == 0 else None
    with ShardSender(fleet) as sender:
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            loss = model(text, labels=text).loss
            loss.backward()
            optimizer.step()
            report = sender.send(model.named_parameters(), weight_version=f"step-{step}")
            for url, receipt in report.answers.items() if report is not None else ():
                print(
                    f"{receipt['weight_version']} at {url}: loss {loss.item():.3f}, "
                    f"{receipt['bytes']} bytes, held for {receipt['stall_ms']:.2f} ms",
                    flush=True,
                )
    if fleet is not None:
        fleet.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
