"""The exchange of attention DP ranks before each forward."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo")
class MLPSyncBatchInfo(Protocol):
    # on the host, (attention DP groups, numbers per group)
    tp0_info_cpu: torch.Tensor
