"""SGLang's attention on the glass card: the ``torch_native`` backend with one launch for a batch.

SGLang's loop over sequences reads each length on the host, which waits for the card. One launch
reads them on the card, so a prefill runs behind the host, and a decode step can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class GlassAttention(TorchNativeAttnBackend):
    """Attends to the paged cache, or to keys at hand where MLA's prompts bring their own."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Prepare nothing: a launch has no state of its own."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache or k is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        heads = layer.tp_q_head_num
        out = q.new_empty((q.shape[0], heads * layer.v_head_dim))
        torch.ops.glass.attend(
            q.view(-1, heads, layer.qk_head_dim),
            out.view(-1, heads, layer.v_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            None,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            layer.scaling,
            -1,
            True,
        )
        return out

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor | None,
        extend_seq_lens: torch.Tensor | None,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        assert encoder_lens is None, "no encoder runs on this card"
        assert scaling is not None
        torch.ops.glass.attend(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            scaling,
            -1 if sliding_window_size is None else sliding_window_size,
            causal,
        )
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        lengths = (seq_lens, None, None)
        return self._run_sdpa_forward_extend(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            *lengths,
            *args,
            **kwargs,
        )


def register() -> None:
    """Make the backend known to SGLang by its name, ``glass``."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from harness.glass.platform import NAME

    register_attention_backend(NAME)(GlassAttention)
