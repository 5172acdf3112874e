"""Write a folder of served weights that is consistent in itself, whatever its tensors hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_inflight.extensions.saves.manifest import FORMAT, MANIFEST, part_file, tensors_file
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest

RANK = "pp0-tp0"


def write_saved(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, weight_version: str = "v1"
) -> None:
    """Write the part of one rank without a layout, and the manifest."""
    save_file(dict(tensors), folder / tensors_file(RANK))
    common = {"format": FORMAT, "save_id": "s"}
    part = {**common, "layout": {}, "tensors": {}, "numbers": {}}
    manifest = {**common, "format_version": 1, "weight_version": weight_version, "ranks": {}}
    (folder / part_file(RANK)).write_text(json.dumps(part))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    describe_tensors(folder, tensors)


def describe_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the digests of ``tensors``, in their order, over those in ``folder``."""
    part = json.loads((folder / part_file(RANK)).read_text())
    manifest = json.loads((folder / MANIFEST).read_text())
    reader, digest = HostReader(), Digest()
    for name, tensor in tensors.items():
        one = TensorDigest(name, tensor)
        for _ in one.read(reader):
            pass
        part["tensors"][name] = one.hexdigest()
        digest.add(one.line)
    size = (folder / tensors_file(RANK)).stat().st_size
    manifest["ranks"] = {RANK: {"digest": digest.hexdigest(), "bytes": size}}
    (folder / part_file(RANK)).write_text(json.dumps(part))
    (folder / MANIFEST).write_text(json.dumps(manifest))
