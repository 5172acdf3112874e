"""Methods of ``sglang.Engine``, one for each row of ``vocabulary/calls.py`` with positions.

With ``non_blocking=True`` an update returns the receipt, and raises on failure. Without it an
update returns SGLang's ``(success, message)``; from disk ``(success, message, 0)``, where SGLang
has a count of paused requests, always 0. Both raise for invalid arguments.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

from sglang_inflight.frontend.engine.arguments import Given
from sglang_inflight.frontend.engine.method import EngineMethod, manager_of
from sglang_inflight.messages import FLATTENED_BUCKET
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.answers import describe_inactive
from sglang_inflight.vocabulary.calls import TABLE

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine


def _say_where(engine: PatchedEngine, given: Given) -> Given:
    for name in ("model_path", "lora_path"):
        if isinstance(given.get(name), os.PathLike):
            given[name] = os.fspath(given[name])
    return given


def _serialize(engine: PatchedEngine, given: Given) -> Given:
    """Make one payload per rank: a payload may be readable only once."""
    tensors = given.pop("named_tensors")
    if given.get("load_format") == FLATTENED_BUCKET:
        payloads = normalize_serialized_named_tensor_payloads(tensors)
    else:
        ranks = manager_of(engine).inflight.ranks.all
        if get_parallel().nnodes == 1:
            payloads = [MultiprocessingSerializer.serialize(tensors) for _ in ranks]
        else:
            # the serializer makes a handle, useless on another machine; a payload by value can be
            # read by each replica and stage
            payloads = [_by_value(tensors)] * len({tp_rank for _, _, tp_rank in ranks})
    return {**given, "serialized_named_tensors": payloads}


def _by_value(tensors: Iterable[tuple[str, Any]]) -> bytes:
    return pickle.dumps(
        [
            # a copy: pickling a view would include its whole storage
            (name, each.detach().cpu().clone() if isinstance(each, torch.Tensor) else each)
            for name, each in tensors
        ]
    )


def _name_dtypes(engine: PatchedEngine, given: Given) -> Given:
    """Convert dtypes to names; SGLang takes both."""
    names = [
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        for dtype in given["dtypes"]
    ]
    return {**given, "dtypes": names}


def _serialize_adapter(engine: PatchedEngine, given: Given) -> Given:
    tensors = given.pop("tensors")
    payloads = engine._serialize_tensors_per_rank(tensors, given.get("load_format"))
    return {**given, "serialized_named_tensors": payloads}


_PREPARE: dict[str, Callable[[Any, Given], Given]] = {
    "update_weights_from_disk": _say_where,
    "update_weights_from_tensor": _serialize,
    "update_weights_from_distributed": _name_dtypes,
    "load_lora_adapter": _say_where,
    "load_lora_adapter_from_tensors": _serialize_adapter,
}

METHODS = {
    call.name: EngineMethod(
        call,
        _PREPARE.get(call.name),
        without_us=describe_inactive if call.name == "inflight_status" else None,
    )
    for call in TABLE.values()
    if call.positional is not None
}
