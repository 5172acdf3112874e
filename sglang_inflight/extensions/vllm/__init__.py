"""vLLM's routes for RL, and vLLM's fields at SGLang's OpenAI routes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import boolean, one_of, read, setting


@dataclass(frozen=True)
class VLLMSettings:
    vllm_routes: bool = setting(
        False, boolean, "answer vLLM's routes for RL too, as vLLM does if safe"
    )
    vllm_sampling_masks: bool = setting(
        False,
        boolean,
        "return the sampling mask of each token at /inference/v1/generate, like vLLM with "
        "--return-sampling-mask; a request may say otherwise by return_sampling_mask",
    )
    vllm_routed_experts: str = setting(
        "npy",
        one_of("npy", "array"),
        "form of routed_experts at /inference/v1/generate: npy is vLLM's, the base64 of a NumPy "
        "file; array is that of prime-rl's server, an object with data, shape, dtype and start",
    )


EXTENSION = Extension(
    name="vllm",
    modules=(
        "sglang_inflight.extensions.vllm.caches",
        "sglang_inflight.extensions.vllm.openai_fields",
        "sglang_inflight.extensions.vllm.routes",
    ),
    settings=VLLMSettings,
    is_on=lambda: read(VLLMSettings).vllm_routes,
    requires=("aborts", "adapters", "continued", "memory", "records", "seeds", "trails"),
)
