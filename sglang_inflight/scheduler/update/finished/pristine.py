"""The model as it is before any weight is loaded: what a checkpoint's tensors are loaded into.

SGLang finishes some models after loading: it repacks or quantizes weights, replaces parameters, or
computes products of them. Such a model cannot take a checkpoint's tensors any more. So its class is
constructed a second time, and this second model is loaded and finished for each update.
"""

from __future__ import annotations

import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

from sglang_inflight.scheduler.update.finished.places import tensors_of

_HOST = torch.device("cpu")


def construct(runner: ModelRunner) -> nn.Module:
    """Return the model of ``runner`` anew, in the layout of its checkpoint, on the host.

    The host gives memory at the first write, so weights take none. Only tensors that the
    constructor fills do, such as default scales.

    Call on the scheduler's thread, before the first step: torch's default dtype is changed
    meanwhile, and it belongs to the whole process. The random numbers of requests stay as they
    are. Raises what the model's constructor raises.
    """
    config = runner.model_config
    quantization = _get_quantization_config(config, runner.load_config)
    with torch.random.fork_rng(), set_default_torch_dtype(config.dtype), _HOST:
        model = _initialize_model(config, runner.load_config, quantization).eval()
    _take_constants(model, runner.model)
    return model


def _take_constants(model: nn.Module, live: nn.Module) -> None:
    """Give the tensors in plain attributes the device and the values of the ``live`` model's.

    Finishing reads tables and masks on the weights' device. The constructor made them on the host.
    """
    weights = {id(weight) for weight in (*model.parameters(), *model.buffers())}
    served = tensors_of(live)
    for place, tensor in tensors_of(model).items():
        constant = served.get(place)
        if constant is None or id(tensor) in weights or constant.device == tensor.device:
            continue
        if (constant.shape, constant.dtype) == (tensor.shape, tensor.dtype):
            tensor.data = constant.data.clone()
