"""Transfer KV from a prefill server to a decode server without an accelerator.

mooncake transfers KV over TCP. SGLang's prefill side copies page indices into pinned memory, and
waits for CUDA's events. Without a device the indices are complete at once.
"""

from __future__ import annotations

import os

from sglang_inflight.sglang_types.runtime_context import get_disagg

# early sending of a prefix needs an event; without it all KV is sent together
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# a sender without this attribute counts as false
PINNED_INDICES = "supports_host_tensor_indices"


def send_without_events() -> None:
    """Patch SGLang's prefill side. Call after the model is loaded, before any request."""
    disagg = get_disagg()
    if disagg.disaggregation_mode != "prefill":
        return
    os.environ.setdefault(EARLY_SEND, "false")
    if disagg.disaggregation_transfer_backend == "mooncake":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        setattr(MooncakeKVSender, PINNED_INDICES, False)
