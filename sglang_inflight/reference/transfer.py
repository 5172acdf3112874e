"""KV that goes from a prefill server to a decode server where there is no accelerator.

mooncake's transfer does so over TCP. SGLang's prefill side then copies page indices into pinned
memory and lets CUDA's events tell when they are there; here they are there at once.
"""

from __future__ import annotations

import os

from sglang_inflight.sglang_types.runtime_context import get_disagg

# an event tells when KV may be sent that a forward still writes; without it, it goes when all goes
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# SGLang takes a sender that has none of that name for one that says no
PINNED_INDICES = "supports_host_tensor_indices"


def send_without_events() -> None:
    """Called when the model is loaded, which is before a request comes."""
    disagg = get_disagg()
    if disagg.disaggregation_mode != "prefill":
        return
    os.environ.setdefault(EARLY_SEND, "false")
    if disagg.disaggregation_transfer_backend == "mooncake":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        setattr(MooncakeKVSender, PINNED_INDICES, False)
