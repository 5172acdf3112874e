"""A test plugin for SGLang: attention DP without a GPU.

SGLang's code pins memory and calls kernels and operators of GPUs; this plugin uses torch's own. The
order of steps and the messages between ranks remain SGLang's. ``INFLIGHT_TEST_LATE_S`` delays
control messages to each further rank by that many seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

LATE_S = float(os.environ.get("INFLIGHT_TEST_LATE_S", 0))


def install() -> None:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    torch.tensor = _unpinned(torch.tensor)
    GroupCoordinator.all_gather_into_tensor = _all_gather
    GroupCoordinator.reduce_scatter_tensor = _reduce_scatter
    if LATE_S:
        from sglang.srt.managers.data_parallel_controller import DataParallelController

        DataParallelController.send_control_message = _send_late


def _send_late(controller: Any, message: Any) -> None:
    from sglang.srt.managers.data_parallel_controller import sock_send

    for number, worker in enumerate(controller.workers[:: controller.control_message_step]):
        if number:
            time.sleep(LATE_S)
        sock_send(worker, message)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return make_unpinned


def _all_gather(group: Any, output: torch.Tensor, own: torch.Tensor) -> None:
    torch.distributed.all_gather_into_tensor(output, own, group=group.device_group)


def _reduce_scatter(group: Any, output: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    # gloo has no such operation
    total = own.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    return output.copy_(total.chunk(group.world_size)[group.rank_in_group])
