"""A test plugin for SGLang: multi-head latent attention on a CPU.

SGLang's torch kernels read the KV pool, which holds latents. Only the absorbed form of MLA attends
to latents. SGLang gives a prompt to the other form, unless the attention's backend says otherwise.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorb(attention: Any, batch: Any) -> AttnForwardMethod:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorb)
