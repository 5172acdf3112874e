"""``python -m tests.support.colocated_trainer URL FOLDER``: train in the memory of a server.

A line of input starts a round, and a line of output ends it with the served version's name. A round
releases the server's memory and trains the previous round's checkpoint in FOLDER until it predicts
the next version's token. Then it resumes the server's memory step by step, while the training's
memory is freed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from safetensors.torch import load_file

from harness import marker
from harness.server import Server
from harness.starting import ROOT, end, start
from sglang_inflight.client import Client, Sender
from tests.support.large_marker import LargeMarker
from tests.support.resident import resident
from tests.support.updates import by_reference

Source = Literal["tensor", "blocking", "disk", "distributed"]

ROUNDS: tuple[Source, ...] = ("tensor", "blocking", "disk", "distributed", "tensor")
MODEL = LargeMarker(vocab=256 << 10, heads=32, kv_heads=32, head_dim=256)
RATE = 0.3

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ColocatedTrainer:
    """The test's end of the trainer process."""

    pid: int
    # resident bytes before the first round
    idle_bytes: int
    _orders: IO[str]
    _answers: IO[str]

    def do_a_round(self) -> str:
        """Run a round, and return the new version's name."""
        print(file=self._orders, flush=True)
        return self._answers.readline().strip()


@contextlib.contextmanager
def colocated_trainer(server: Server, folder: Path) -> Iterator[ColocatedTrainer]:
    reads, orders = os.pipe()
    answers, writes = os.pipe()
    with open(reads) as given, open(writes, "w") as output:
        process = start(
            ["-m", "tests.support.colocated_trainer", server.url, str(folder)],
            reads=given,
            output=output,
            errors=sys.__stderr__,
            cwd=ROOT,
        )
    with open(orders, "w") as to_trainer, open(answers) as from_trainer:
        try:
            assert from_trainer.readline() == "up\n"
            yield ColocatedTrainer(process.pid, resident(process.pid), to_trainer, from_trainer)
        finally:
            end(process)


# ---- the trainer process ---------------------------------------------------------------


def main(url: str, folder: Path) -> None:
    torch.set_num_threads(1)
    print("up", flush=True)
    with Client(url) as client:
        for version, (way, _) in enumerate(zip(ROUNDS, sys.stdin, strict=False), 1):
            with client.paused("retract"):
                client.release_memory(keep_weights="discard")
                checkpoint = folder / f"v{version}"
                MODEL.write(checkpoint, train(folder / f"v{version - 1}", version))
                client.resume_memory("weights")
                send(client, way, checkpoint)
                client.resume_memory("kv_cache", "cuda_graph")
            print(checkpoint.name, flush=True)


def train(checkpoint: Path, version: int) -> Weights:
    """Train the head in float32 with Adam, which takes eight times the served head's memory."""
    weights = load_file(checkpoint / "model.safetensors")
    head = torch.nn.Parameter(weights["lm_head.weight"].float())
    optimizer = torch.optim.Adam([head], lr=RATE, fused=True)
    wanted = torch.tensor([marker.token(version)])
    hidden = torch.ones(1, marker.HIDDEN)
    while (logits := hidden @ head.T).argmax() != wanted:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted).backward()
        optimizer.step()
    return {**weights, "lm_head.weight": head.detach().bfloat16()}


def send(client: Client, way: Source, checkpoint: Path) -> None:
    name = checkpoint.name
    if way == "disk":
        client.update_from_disk(str(checkpoint), weight_version=name, partial=False)
        return
    weights = load_file(checkpoint / "model.safetensors")
    if way == "distributed":
        with Sender(client, bucket_bytes=16 << 20) as sender:
            sender.send(weights.items(), weight_version=name)
        return
    client.update(
        "tensor",
        serialized_named_tensors=[by_reference(list(weights.items()))],
        non_blocking=way == "tensor",
        weight_version=name,
        partial=False,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
