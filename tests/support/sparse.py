"""Sparse updates of the marker model, and folders of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness import marker
from harness.server import Server
from harness.trainer import Trainers
from tests.support.updates import TIMEOUT_S, Weights, tensor_body

HEAD = "lm_head.weight"
SPARSE_SOURCES = ("tensor", "disk", "distributed")
_COUNT = marker.VOCAB * marker.HIDDEN


def changes(before: Weights, after: Weights) -> Weights:
    """Return the positions and values that make ``after`` of ``before``."""
    found: Weights = {}
    for name, tensor in after.items():
        at = (tensor != before[name]).view(-1).nonzero().view(-1)
        if len(at):
            found |= pair(name, at.to(torch.int32), tensor.view(-1)[at])
    return found


def changes_between(old: int, new: int, model: marker.Model = marker) -> Weights:
    return changes(model.tensors(old), model.tensors(new))


def pair(name: str, indices: Any, values: torch.Tensor) -> Weights:
    return {f"{name}.indices": torch.as_tensor(indices), f"{name}.values": values}


# sparse tensors of the marker model, and words of the refusal
BAD: dict[str, tuple[Weights, tuple[str, ...]]] = {
    "out of range": (pair(HEAD, [_COUNT], torch.ones(1)), (HEAD, f"index {_COUNT} ")),
    "negative": (pair(HEAD, [-1], torch.ones(1)), (HEAD, "index -1 ")),
    "twice": (pair(HEAD, [3, 3], torch.ones(2)), (HEAD, "index 3 comes twice")),
    "lengths": (pair(HEAD, [3], torch.ones(2)), (HEAD, "one length")),
    "not a row": (pair(HEAD, [[3]], torch.ones(1, 1)), (HEAD, "one length")),
    "unknown tensor": (pair("other.weight", [3], torch.ones(1)), ("other.weight",)),
    "no values": ({f"{HEAD}.indices": torch.tensor([3])}, (HEAD, f"lacks '{HEAD}.values'")),
    "no indices": ({f"{HEAD}.values": torch.ones(1)}, (HEAD, f"lacks '{HEAD}.indices'")),
    "float indices": (pair(HEAD, [3.0], torch.ones(1)), (HEAD, "float32")),
    "whole numbers": (pair(HEAD, [3], torch.tensor([1])), (HEAD, "int64")),
    "NaN": (pair(HEAD, [3], torch.tensor([torch.nan])), (HEAD, "NaN")),
    "whole tensor": ({HEAD: torch.ones(4)}, (HEAD, "NAME.indices")),
}


def write_folder(folder: Path, *files: Weights, base_version: str, **manifest: Any) -> Path:
    """Write sparse tensors, one file for each of ``files``, and their manifest.

    ``manifest`` replaces fields of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for at, weights in enumerate(files):
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            folder / f"part-{at}.safetensors",
        )
    describe(folder, base_version=base_version, **manifest)
    return folder


def describe(folder: Path, *, base_version: str, **manifest: Any) -> None:
    """Write the manifest of the files in ``folder``."""
    fields = {
        "format": "sglang-inflight-sparse",
        "format_version": 1,
        "base_version": base_version,
        "files": {
            file.name: {
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                "bytes": file.stat().st_size,
            }
            for file in sorted(folder.glob("*.safetensors"))
        },
    }
    (folder / "sparse.json").write_text(json.dumps(fields | manifest))


class SparseSender:
    """Sends sparse tensors to a server, from any source."""

    def __init__(self, trainers: Trainers, folder: Path) -> None:
        self._trainers = trainers
        self._folder = folder
        self._written = 0

    def send(
        self,
        server: Server,
        source: str,
        weights: Weights,
        *,
        base_version: str,
        ranks: int = 1,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send, and return the server's answer. ``ranks`` counts over all replicas."""
        body: dict[str, Any] = {**fields, "load_format": "sparse"}
        if source == "disk":
            self._written += 1
            folder = self._folder / str(self._written)
            write_folder(folder, *halves_of(weights), base_version=base_version)
            return _post(server, source, {**body, "model_path": str(folder)})
        body |= {"expected_version": base_version}
        if source == "tensor":
            return _post(server, source, tensor_body(weights, ranks=ranks, **body))
        trainer = self._trainers.get()
        with trainer.group(server, ranks=ranks):
            trainer.send_tensors(weights)
            answer = _post(server, source, {**layout_of(weights), **body})
            assert trainer.answer() == "sent"
        return answer


def halves_of(weights: Weights) -> Sequence[Weights]:
    """Return ``weights`` in two files, without parting a pair."""
    names = sorted({name.rpartition(".")[0] for name in weights})
    chosen = set(names[: len(names) // 2])
    return [
        {name: t for name, t in weights.items() if (name.rpartition(".")[0] in chosen) == first}
        for first in (True, False)
    ]


def layout_of(weights: Weights) -> dict[str, Any]:
    return {
        "names": [*weights],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def _post(server: Server, source: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(f"/update_weights_from_{source}", body, timeout=TIMEOUT_S)
    return answer
