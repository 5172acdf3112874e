"""A trainer's bfloat16 on a server whose checkpoint is stored in blocks of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.server import Server, serve
from harness.trainer import Trainers
from tests.support import floats
from tests.support.updates import Sender, by_reference, refuse, succeed

pytest_plugins = ["tests.support.fixtures"]

SOURCES = ["disk", "tensor", "tensor_bucket", "distributed", "ipc"]
# per layer: four projections of attention, three of the MLP
QUANTIZED = {"bfloat16 to float8_e4m3fn, blocks of 16 by 16": 14}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("floats")
    for version in range(len(SOURCES) + 1):
        floats.build(made / "floats" / f"v{version}", version)
        floats.build_reference(made / "stored" / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, trainers: Trainers) -> Iterator[Server]:
    with serve(folder / "stored" / "v0", log=folder / "log", env=floats.ENV) as server:
        yield server


@pytest.fixture
def sender(folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder / "floats", folder / "floats", trainers, floats)


def logprobs(server: Server) -> list[Any]:
    """Return tokens and their logprobs, of a prompt and its answer."""
    answer = server.post(
        "/generate",
        {
            "input_ids": [5, 6, 7, 8],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )["meta_info"]
    return [answer["input_token_logprobs"], answer["output_token_logprobs"]]


def stored(folder: Path, version: int) -> dict[str, Any]:
    return {"model_path": str(folder / "stored" / f"v{version}"), "non_blocking": True}


def send(server: Server, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    # torch cannot read FP8 from a pickle by value
    payload = by_reference(list(weights.items()))
    body = {"serialized_named_tensors": [payload], "non_blocking": True}
    answer: dict[str, Any] = server.post("/update_weights_from_tensor", body)
    return answer


def test_floats_from_every_source_serve_the_reference(
    server: Server, sender: Sender, folder: Path
) -> None:
    """Digests compare all weights. The floats come first, so they cannot find the others there."""
    for version, source in enumerate(SOURCES, start=1):
        receipt = succeed(sender.send(server, source, version, partial=False, non_blocking=True))
        assert receipt["quantized"] == QUANTIZED, source
        assert receipt["tensors"] == len(floats.tensors(version)), source
        served = logprobs(server)
        other = succeed(server.post("/update_weights_from_disk", stored(folder, version)))
        assert other["quantized"] == {}
        assert receipt["ranks"] == other["ranks"], source
        assert served == logprobs(server), source


def test_floats_serve_what_a_fresh_server_serves(
    server: Server, sender: Sender, folder: Path
) -> None:
    succeed(sender.send(server, "tensor", 3, partial=False, non_blocking=True))
    with serve(folder / "stored" / "v3", log=folder / "fresh", env=floats.ENV) as fresh:
        assert logprobs(server) == logprobs(fresh)


def test_one_layer_in_floats_leaves_the_others(server: Server, folder: Path) -> None:
    succeed(server.post("/update_weights_from_disk", stored(folder, 1)))
    name = "model.layers.1.mlp.up_proj.weight"
    in_floats = {name: floats.tensors(2)[name]}
    whole = floats.reference(2)
    as_stored = {key: whole[key] for key in (name, f"{name}_scale_inv")}
    receipts = [succeed(send(server, weights)) for weights in (in_floats, as_stored)]
    assert receipts[0]["quantized"] == dict.fromkeys(QUANTIZED, 1)
    assert receipts[0]["ranks"] == receipts[1]["ranks"]
    assert receipts[0]["tensors"] == 1


def test_floats_with_their_scales_are_refused_by_name(server: Server, folder: Path) -> None:
    succeed(server.post("/update_weights_from_disk", stored(folder, 1)))
    before = logprobs(server)
    name = "model.layers.0.mlp.down_proj.weight"
    scale = f"{name}_scale_inv"
    both = {scale: floats.reference(2)[scale], name: floats.tensors(2)[name]}
    for weights, words in (
        (both, (name, scale, "came as floats")),
        ({scale: both[scale]}, (name, scale, "belong together")),
        ({name: floats.reference(2)[name]}, (name, scale, "belong together")),
    ):
        refuse(send(server, weights), *words)
        succeed(server.post("/update_weights_from_disk", stored(folder, 1)))
        assert logprobs(server) == before
