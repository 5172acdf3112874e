"""Names and shapes of a checkpoint's tensors, from SGLang's own class.

Transformers lacks some of SGLang's classes. SGLang's class then gives the tensors: a loader's usual
joins are undone, and the configuration is written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import nn

from harness.server import free_port
from tests.families.families import Family

# mypy takes SGLang's generated constructor for one without arguments
_ARGUMENTS: Any = ServerArgs
# joined tensors, and their parts in a checkpoint
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def parameters(family: Family, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the configuration in ``folder``, under a checkpoint's names."""
    model = _model(folder, family)
    joined = _JOINED | dict(family.joined)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= dict(_parts(name, parameter.data, joined, stacked=family.stacked))
    return tensors


def _parts(
    name: str, tensor: torch.Tensor, joined: dict[str, tuple[str, ...]], *, stacked: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for whole, parts in joined.items():
        if f".{whole}." in name:
            for part, rows in zip(parts, _split(tensor, len(parts)), strict=True):
                yield name.replace(whole, part), rows
            return
    experts, _, last = name.rpartition(".")
    if last not in _EXPERTS:
        yield name, tensor
        return
    halves = tensor.split(tensor.shape[1] // len(_EXPERTS[last]), dim=1)
    for part, half in zip(_EXPERTS[last], halves, strict=True):
        if stacked:
            yield f"{experts.removesuffix('.experts')}.{part}.weight", half.clone()
        else:
            for number, expert in enumerate(half):
                yield f"{experts}.{number}.{part}.weight", expert.clone()


def _split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return the rows of each part. Queries have twice the heads of keys and of values."""
    rows = len(tensor)
    sizes = [rows // 2, rows // 4, rows // 4] if parts == 3 else [rows // parts] * parts
    return [part.clone() for part in tensor.split(sizes)]


def _model(folder: Path, family: Family) -> nn.Module:
    return _initialize_model(config_of(folder, family), LoadConfig())


def config_of(folder: Path, family: Family) -> ModelConfig:
    """Return the configuration in ``folder``, and put it into effect in this process."""
    args = _ARGUMENTS(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        is_embedding="--is-embedding" in family.flags,
        model_impl="transformers" if "transformers" in family.flags else "auto",
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    _begin_groups()
    return ModelConfig.from_server_args(args)


@functools.cache
def _begin_groups() -> None:
    """Make the groups of one rank, once in a process."""
    address = f"tcp://127.0.0.1:{free_port()}"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=address
    )
    initialize_model_parallel()
