"""A trainer in a process of its own, which broadcasts a checkpoint to a running server.

``python -m examples.stories.trainer --help``. It is rank 0 of a process group whose
other ranks are the server's. It prints one JSON object a line on stdout; the last one is
the receipt. With ``--wait`` it joins, prints ``{"event": "ready"}``, and reads the
checkpoint and broadcasts it when it gets a line on stdin.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist

from examples.stories.updates import IN_FLIGHT, Receipt, read_receipt
from examples.stories.weights import NamedTensor, read_tensors

JOIN_TIMEOUT = timedelta(seconds=120)
POLL_S = 0.001


class UpdateFailed(Exception):
    """The server answered before it had everything. ``receipt`` says why."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt["message"])
        self.receipt = receipt


@dataclass(frozen=True)
class Pace:
    """``bytes_per_s`` None is as fast as it goes."""

    bytes_per_s: float | None

    def hold(self, sent: int, since: float) -> None:
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, since + sent / self.bytes_per_s - time.monotonic()))


class Trainer:
    """Every call blocks the server's end of it, so calls run beside our end, in a thread."""

    def __init__(self, server: str, group_name: str, *, backend: str, engine_ranks: int) -> None:
        self._client = httpx.Client(base_url=server, timeout=600)
        self._thread = ThreadPoolExecutor(1)
        self._group_name = group_name
        self._backend = backend
        self._engine_ranks = engine_ranks
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        from sglang.srt.utils import init_custom_process_group
        from sglang.srt.utils.network import get_free_port_below_ephemeral

        port = get_free_port_below_ephemeral()
        world_size = 1 + self._engine_ranks
        joined = self._call(
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": self._backend,
            },
        )
        try:
            self._group = init_custom_process_group(
                backend=self._backend,
                init_method=f"tcp://127.0.0.1:{port}",
                timeout=JOIN_TIMEOUT,
                world_size=world_size,
                rank=0,
                group_name=self._group_name,
            )
        except dist.DistError:
            # the server's own reason, where it has one, says more than a timeout
            _demand(joined.result())
            raise
        _demand(joined.result())

    def update(self, tensors: Sequence[NamedTensor], version: str, pace: Pace) -> Receipt:
        answer = self._call(
            "/update_weights_from_distributed",
            {
                "names": [name for name, _ in tensors],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                "shapes": [list(tensor.shape) for _, tensor in tensors],
                "group_name": self._group_name,
                "partial": False,
                "weight_version": version,
                **IN_FLIGHT,
            },
        )
        self._broadcast(tensors, pace, answer)
        return answer.result()

    def leave(self) -> None:
        left = self._call("/destroy_weights_update_group", {"group_name": self._group_name})
        dist.destroy_process_group(self._group)
        _demand(left.result())

    def _broadcast(
        self, tensors: Sequence[NamedTensor], pace: Pace, answer: Future[Receipt]
    ) -> None:
        """Give up when the server has refused, instead of waiting for it to receive."""
        started, sent = time.monotonic(), 0
        for _, tensor in tensors:
            work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                if answer.done():
                    _demand(answer.result())
                time.sleep(POLL_S)
            work.wait()
            sent += tensor.nbytes
            pace.hold(sent, started)

    def _call(self, path: str, body: dict[str, Any]) -> Future[Receipt]:
        return self._thread.submit(self._post, path, body)

    def _post(self, path: str, body: dict[str, Any]) -> Receipt:
        try:
            return read_receipt(self._client.post(path, json=body))
        except httpx.HTTPError as error:
            return {"success": False, "message": f"{path}: {type(error).__name__}: {error}"}


def _demand(receipt: Receipt) -> None:
    if not receipt["success"]:
        raise UpdateFailed(receipt)


def _choose_backend(engine_ranks: int) -> str:
    """NCCL wants a GPU for each rank, the trainer's included."""
    return "nccl" if torch.cuda.device_count() > engine_ranks else "gloo"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.stories.trainer")
    parser.add_argument("--server", required=True, help="the server's URL")
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder of safetensors")
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--engine-ranks", type=int, default=1, help="ranks of the server")
    parser.add_argument("--group-name", default="weight_update_group")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: what fits")
    parser.add_argument("--max-mb-per-s", type=float, help="default: no limit")
    parser.add_argument("--wait", action="store_true", help="broadcast on a line from stdin")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # answers own stdout: whatever else wants to print goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)

    backend = options.backend or _choose_backend(options.engine_ranks)
    device = f"cuda:{options.engine_ranks}" if backend == "nccl" else "cpu"
    limit = None if options.max_mb_per_s is None else options.max_mb_per_s * 1e6
    trainer = Trainer(
        options.server, options.group_name, backend=backend, engine_ranks=options.engine_ranks
    )
    try:
        trainer.join()
        if options.wait:
            print(json.dumps({"event": "ready"}), file=answers, flush=True)
            sys.stdin.readline()
        tensors = [(name, tensor.to(device)) for name, tensor in read_tensors(options.checkpoint)]
        receipt = trainer.update(tensors, options.weight_version, Pace(limit))
        trainer.leave()
    except UpdateFailed as failure:
        receipt = failure.receipt
    print(json.dumps(receipt), file=answers, flush=True)
    return 0 if receipt["success"] else 1


if __name__ == "__main__":
    # an abandoned broadcast would keep its thread, and with it this process, alive
    code = main()
    sys.stderr.flush()
    os._exit(code)
