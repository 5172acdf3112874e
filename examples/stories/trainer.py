"""Broadcast a checkpoint to a running server, from a separate process.

``python -m examples.stories.trainer --help``. The trainer joins the server's ranks in a process
group and prints ``{"event": "ready"}``. After a line on stdin it reads the checkpoint, sends it,
and prints the receipt. Each line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import torch

from examples.stories.weights import read_tensors
from sglang_inflight.client import Client, Sender
from sglang_inflight.vocabulary.errors import InflightError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # stdout is for answers: all other output goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    backend: Literal["gloo", "nccl"] = options.backend or _choose_backend()
    if backend == "nccl":
        # the server uses the first GPU
        torch.cuda.set_device(1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        with Client(options.server) as client, Sender(client, backend=backend) as sender:
            say({"event": "ready"})
            sys.stdin.readline()
            weights = read_tensors(options.checkpoint)
            receipt = sender.send(weights, weight_version=options.weight_version).receipt
            assert receipt is not None, "a session that has ended has one"
            say(receipt.as_json())
    except (InflightError, httpx.HTTPError) as error:
        say({"success": False, "message": str(error) or type(error).__name__})
        return 1
    return 0


def _choose_backend() -> Literal["gloo", "nccl"]:
    """Choose NCCL only with a GPU for each rank, the trainer's included."""
    return "nccl" if torch.cuda.device_count() > 1 else "gloo"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.stories.trainer")
    parser.add_argument("--server", required=True, help="the server's URL")
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder of safetensors")
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: what fits")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
