"""A marker whose every second layer has a sliding window: it has two KV pools.

SGLang gives such layers a smaller pool. A request's slots are those of the larger pool.
"""

from __future__ import annotations

from pathlib import Path

from harness import marker

WINDOW = 32

CONFIG = {
    **marker.TWO_LAYERS,
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    },
    # an expert layer is required of the config, though no layer uses it
    "mlp_layer_types": ["dense", "dense"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": marker.FFN,
}


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, marker.tensors(version, layers=2), CONFIG)
