"""Small checkpoints with random weights, for SGLang's model classes.

Transformers' class of the same name gives the configuration and the names of the tensors. Every
size of the configuration becomes small. Every tensor differs between the two versions, and each of
some others differs from the first in one element of each tensor.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from harness.marker import VOCAB
from tests.families import named
from tests.families.families import Family, merged

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS = 64, 4, 2, 16, 2, 4
VERSIONS = 2
SPREAD = 0.1
# checkpoints that differ from the first in one element of each tensor, and where that is: the
# first, the last, or one that each name has to itself
NEARBY: dict[str, Callable[[str, int], int]] = {
    "v0-first": lambda name, elements: 0,
    "v0-last": lambda name, elements: elements - 1,
    "v0-anywhere": lambda name, elements: zlib.crc32(name.encode()) % elements,
}
FOLDERS = (*(f"v{version}" for version in range(VERSIONS)), *NEARBY)

# sizes by the names of a configuration's fields
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim"), HIDDEN),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
            "decoder_layers", "depth",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        HEADS,
    ),
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    **dict.fromkeys(
        (
            "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim",
            "decoder_ffn_dim",
        ),
        2 * HIDDEN,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size", "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        ),
        HIDDEN // 2,
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2
    ),
    "vocab_size": VOCAB,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), 4096),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def build(name: str, family: Family, folder: Path) -> None:
    """Write the checkpoints of class ``name`` into ``folder``, each into one of ``FOLDERS``."""
    if family.model_type is None:
        _build_alike(name, family, folder)
    else:
        _build_named(name, family, folder)
    for nearby, choose in NEARBY.items():
        shutil.copytree(folder / "v0", folder / nearby)
        for file in (folder / nearby).glob("*.safetensors"):
            tensors = _read_file(file)
            for tensor_name, changed in tensors.items():
                if is_taken_sparse(changed) and changed.numel():
                    changed.view(-1)[choose(tensor_name, changed.numel())] += SPREAD
            save_file(tensors, file, metadata={"format": "pt"})


def is_taken_sparse(tensor: torch.Tensor) -> bool:
    """Return whether servers take single elements of ``tensor``."""
    return tensor.is_floating_point() and tensor.itemsize >= 2


def _build_alike(name: str, family: Family, folder: Path) -> None:
    model = _small(name, family)
    for version in range(VERSIONS):
        _fill(_stored(model), version)
        made = folder / f"v{version}"
        model.save_pretrained(made)
        config = json.loads((made / "config.json").read_text())
        _write_config(made, merged(_described(config, name), family.written))
        if family.renames:
            _rename(made, family.renames)


def _build_named(name: str, family: Family, folder: Path) -> None:
    usual = AutoConfig.for_model(family.model_type)
    config = type(usual)(**merged(_shrunk(usual), family.fields)).to_dict()
    config = merged(config | family.fields, family.written)
    for version in range(VERSIONS):
        _write_config(folder / f"v{version}", _described(config, name))
    tensors = named.parameters(family, folder / "v0")
    for version in range(VERSIONS):
        _fill(tensors.values(), version)
        save_file(tensors, folder / f"v{version}" / "model.safetensors")


def _described(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**config, "architectures": [name], "torch_dtype": "bfloat16"}


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= _read_file(file)
    return tensors


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _small(name: str, family: Family) -> Any:
    model_class = getattr(transformers, family.alike or name)
    config_class = model_class.config_class
    fields = merged(_shrunk(config_class()), family.fields)
    config = config_class(**fields)
    torch.manual_seed(0)
    return model_class(config).to(torch.bfloat16)


def _shrunk(config: Any) -> dict[str, Any]:
    """Return the fields to change, also those of configurations inside ``config``."""
    inner = type(config).sub_configs
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in inner and hasattr(getattr(config, name, None), "to_dict"):
            own = getattr(config, name)
            fields[name] = {"model_type": own.model_type, **_shrunk(own)}
        elif isinstance(value, list) and len(value) == _layers_of(config):
            size = _SIZES.get(name)
            fields[name] = _one_of_each_kind(value) if size is None else [size] * LAYERS
        elif name in _SIZES and value is not None and not isinstance(value, list | dict):
            fields[name] = _SIZES[name]
    return fields


def _layers_of(config: Any) -> int | None:
    layers: int | None = getattr(config, "num_hidden_layers", None)
    return layers


def _one_of_each_kind(layers: list[Any]) -> list[Any]:
    """Return what the small model's layers have, of what each of many layers has."""
    kinds = [kind for number, kind in enumerate(layers) if kind not in layers[:number]]
    return [kinds[number % len(kinds)] for number in range(LAYERS)]


def _fill(tensors: Iterable[torch.Tensor], version: int) -> None:
    """Give each tensor values of its own in each version.

    Vectors stay near their values, because a norm far from one would drown all other tensors.
    """
    random = torch.Generator().manual_seed(version)
    for tensor in tensors:
        noise = torch.randn(tensor.shape, generator=random) * SPREAD
        if tensor.dim() > 1:
            tensor.data.copy_(noise)
        else:
            tensor.data.add_(noise.to(tensor.dtype))


def _stored(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a checkpoint."""
    yield from model.parameters()
    stored = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            yield buffer


def _rename(folder: Path, renames: Mapping[str, str]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = _read_file(file)
        for old, new in renames.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
