"""A second process sends tensors by handles to its memory, while 16 streams decode.

This process is the sender. It writes other numbers into its buffer as soon as a call is answered,
because a trainer does the same with its next tensors.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import torch
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

from benchmarks.gpu.card import need_gpu
from benchmarks.gpu.marked import SMALL, TINY, Marked
from benchmarks.gpu.servers import (
    end_streams,
    expect_graphs,
    label_values,
    serving,
    start_streams,
    started,
)
from benchmarks.gpu.step import Step, Values, main
from harness.server import Server
from harness.trainer import FLATTENED_BUCKET
from tests.support.load import more_tokens, versions_of
from tests.support.updates import LIVE, by_reference, flatten, succeed

LIMIT_S = 90
PARTS = ("host memory", "CUDA IPC")
BUCKETS = 3


def run(step: Step) -> None:
    model = TINY if step.small else SMALL
    with tempfile.TemporaryDirectory() as name:
        served = model.build(Path(name) / "v0", 0)
        starts = {
            part: functools.partial(serving, served, log=step.logs / f"{part}.log")
            for part in PARTS
        }
        with started(starts) as server_of:
            with step.part("host memory") as values, server_of("host memory") as server:
                _send(server, model, torch.device("cpu"), values)
            with step.part("CUDA IPC") as values:
                need_gpu("SGLang's clients have no handles for memory of the glass card.")
                # SGLang's clients name a device in its handles by its UUID
                monkey_patch_torch_reductions()
                with server_of("CUDA IPC") as server:
                    _send(server, model, torch.device("cuda"), values)


def _send(server: Server, model: Marked, device: torch.device, values: Values) -> None:
    streams = start_streams(server)
    begin = time.perf_counter()
    for version in (1, 2):
        session = succeed(server.post("/begin_weight_update", {"non_blocking": True}))
        weights = {k: v.to(device) for k, v in model.tensors(version).items()}
        names = sorted(weights)
        for first in range(BUCKETS):
            bucket = flatten({name: weights[name] for name in names[first::BUCKETS]})
            body = {
                "serialized_named_tensors": [by_reference(bucket)],
                "load_format": FLATTENED_BUCKET,
                "session_id": session["session_id"],
            }
            succeed(server.post("/update_weights_from_tensor", body))
            bucket["flattened_tensor"].fill_(0xFF)
        end = {"session_id": session["session_id"], "weight_version": f"v{version}", **LIVE}
        receipt = succeed(server.post("/end_weight_update", end))
        values["stall_ms"] = receipt["stall_ms"]
        more_tokens(list(streams))
    values["two_updates_s"] = time.perf_counter() - begin
    expect_graphs(server)
    outputs = end_streams(streams)
    values |= label_values(outputs)
    for output in outputs:
        if versions_of(output) != ["v0", "v1", "v2"]:
            raise AssertionError(f"a stream has the versions {versions_of(output)}")


if __name__ == "__main__":
    main("ipc", "Tensors from a second process", PARTS, run)
