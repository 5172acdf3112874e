"""A test plugin for SGLang: small models of many classes on a CPU.

**Images and sound.** SGLang makes a processor of them for a model that understands them, from files
that a small checkpoint lacks. No request with text alone uses it.

**Attention sinks.** SGLang's torch implementation does not know them. A sink is a logit of each
head that takes its share of the attention and gives nothing.

**The device of a kernel.** Kernels are launched beside their tensors' device, which torch names for
accelerators alone. Triton's interpreter runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.managers import tokenizer_manager

    manager: Any = tokenizer_manager
    manager.get_processor_wrapper = manager.get_mm_processor = _make_none
    backend: Any = torch_native_backend
    cpu: Any = torch.cpu
    cpu.device = lambda index: nullcontext()
    attend = _Attention(backend.scaled_dot_product_attention)
    backend.scaled_dot_product_attention = attend
    for name in ("forward_extend", "forward_decode"):
        forward = getattr(backend.TorchNativeAttnBackend, name)
        setattr(backend.TorchNativeAttnBackend, name, attend.with_sinks(forward))


def _make_none(*args: Any, **kwargs: Any) -> None:
    return None


class _Attention:
    """Torch's attention, with the sinks of the layer that is being computed."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend
        self._sinks: torch.Tensor | None = None

    def with_sinks(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
            self._sinks = sinks
            return forward(*args, **kwargs)

        return run

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._sinks is None:
            return self._attend(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, **kwargs
            )
        queries, keys = query.shape[-2], key.shape[-2]
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if attn_mask is not None:
            seen = attn_mask
        elif is_causal:
            seen = seen.tril()
        # a key of zeros has the logit 0, to which the mask adds the sink
        mask = torch.zeros(1, query.shape[-3], queries, keys + 1, dtype=query.dtype)
        mask[..., :keys].masked_fill_(~seen, float("-inf"))
        mask[..., keys] = self._sinks.to(query.dtype)[:, None]
        key, value = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
        return self._attend(query, key, value, attn_mask=mask, is_causal=False, **kwargs)
