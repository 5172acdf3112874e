"""Methods of ``sglang.Engine`` for pauses, updates, adapters and memory.

With ``non_blocking=True`` an update returns the receipt, and raises on failure. Without it an
update returns SGLang's ``(success, message)``; from disk ``(success, message, 0)``, where SGLang
has a count of paused requests, always 0. Both raise for invalid arguments.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.utils import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

from sglang_inflight.frontend.as_sglang import SuccessAndMessage, as_sglang_answers
from sglang_inflight.frontend.engine.arguments import Given
from sglang_inflight.frontend.engine.method import EngineMethod, engine_method, manager_of
from sglang_inflight.messages import FLATTENED_BUCKET
from sglang_inflight.sglang_types.runtime_context import get_parallel
from sglang_inflight.vocabulary.answers import (
    Begun,
    Deferred,
    Grant,
    MemoryMoved,
    NamelessGrant,
    Receipt,
    Release,
    StagedSoFar,
    Status,
    WindowGrant,
    WindowRelease,
    describe_inactive,
)
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    ContinueBody,
    DiskBody,
    DistributedBody,
    EndBody,
    IPCBody,
    JoinGroupBody,
    LeaveGroupBody,
    LoadFolderBody,
    LoadTensorsBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    RollbackBody,
    SealBody,
    TensorBody,
    UnloadAdapterBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import AdapterAnswer

Outcome = Receipt | StagedSoFar | Begun | Deferred | SuccessAndMessage | tuple[bool, str, int]


A = TypeVar("A", bound=Receipt | StagedSoFar | Begun | Deferred)


class NoArguments(Body, kw_only=True):
    pass


# ---- pauses ------------------------------------------------------------------------


@engine_method(PauseBody, "mode")
async def pause_generation(
    engine: PatchedEngine, body: PauseBody
) -> Grant | NamelessGrant | WindowGrant:
    """Pause generation, or renew a pause. Return when every rank is paused.

    ``mode`` is "abort" (the default), "in_place", "retract" or "wait". The answer has the
    ``pause_id`` for renewal and release; ``new_id`` chooses it. ``lease_s`` seconds after the last
    renewal generation continues by itself. ``timeout_s`` bounds the wait of the mode "wait".

    Raises ``Conflict`` if ``pause_id`` is not held any more.
    """
    return await manager_of(engine).inflight.calls.pause(body)


@engine_method(ContinueBody)
async def continue_generation(engine: PatchedEngine, body: ContinueBody) -> Release | WindowRelease:
    """Release the pause ``pause_id``, or all; generation continues when none is left.

    Raises ``Conflict`` if ``pause_id`` is not held any more.
    """
    return await manager_of(engine).inflight.calls.resume(body)


@engine_method(NoArguments)
async def is_paused(engine: PatchedEngine, body: NoArguments) -> bool:
    """Return whether generation is paused. Raises ``Conflict`` if the replicas differ."""
    return await manager_of(engine).inflight.calls.is_paused()


@engine_method(NoArguments, without_us=describe_inactive)
async def inflight_status(engine: PatchedEngine, body: NoArguments) -> Status:
    """Return the first rank's state, holders, versions and staging; ``ranks`` has each rank's.

    If the engine runs without SGLang Inflight, return ``{"active": False}`` with the reason.
    """
    return await manager_of(engine).inflight.status()


# ---- updates -----------------------------------------------------------------------


def _say_where(engine: PatchedEngine, given: Given) -> Given:
    for name in ("model_path", "lora_path"):
        if isinstance(given.get(name), os.PathLike):
            given[name] = os.fspath(given[name])
    return given


@engine_method(DiskBody, "model_path", "load_format", prepare=_say_where)
async def update_weights_from_disk(engine: PatchedEngine, body: DiskBody) -> Outcome:
    """Update from a checkpoint's folder: a whole checkpoint, unless ``partial`` is true.

    With ``non_blocking=True`` requests run on meanwhile, and the result is the receipt. docs/api.md
    has a table of the fields.
    """
    outcome = await _update(engine, body)
    return (*outcome, 0) if isinstance(outcome, tuple) else outcome


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


@engine_method(TensorBody, "named_tensors", "load_format", "flush_cache", prepare=_serialize)
async def update_weights_from_tensor(engine: PatchedEngine, body: TensorBody) -> Outcome:
    """Update from ``(name, tensor)`` pairs, or from one serialized payload per rank.

    Within a session, or with ``non_blocking=True``. docs/api.md has a table of the fields.
    """
    return await _update(engine, body)


def _name_dtypes(engine: PatchedEngine, given: Given) -> Given:
    """Convert dtypes to names; SGLang takes both."""
    names = [
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        for dtype in given["dtypes"]
    ]
    return {**given, "dtypes": names}


@engine_method(
    DistributedBody,
    "names",
    "dtypes",
    "shapes",
    "group_name",
    "flush_cache",
    "load_format",
    prepare=_name_dtypes,
)
async def update_weights_from_distributed(engine: PatchedEngine, body: DistributedBody) -> Outcome:
    """Update from broadcasts by rank 0 of ``group_name``.

    Within a session, or with ``non_blocking=True``. docs/api.md has a table of the fields.
    """
    return await _update(engine, body)


@engine_method(IPCBody, "zmq_handles", "flush_cache")
async def update_weights_from_ipc(engine: PatchedEngine, body: IPCBody) -> Outcome:
    """Update from a checkpoint-engine process. docs/api.md has a table of the fields."""
    return await _update(engine, body)


@engine_method(BeginBody, "selector")
async def begin_weight_update(engine: PatchedEngine, body: BeginBody) -> Outcome:
    """Open a session: its calls go live together, at ``end_weight_update``.

    With ``non_blocking=True``, return HTTP's answer with the ``session_id``; ``new_id`` chooses
    it. With ``session_id``, renew that session's lease.
    """
    return await _answer(manager_of(engine).inflight.calls.begin(body), body.non_blocking)


@engine_method(SealBody)
async def seal_weight_update(engine: PatchedEngine, body: SealBody) -> StagedSoFar:
    """Check the session and vote for it on every rank, without committing it."""
    return await manager_of(engine).inflight.calls.seal(body)


@engine_method(EndBody)
async def end_weight_update(engine: PatchedEngine, body: EndBody) -> Outcome:
    """Commit the session on every rank."""
    return await _answer(manager_of(engine).inflight.calls.end(body), body.non_blocking)


@engine_method(AbortUpdateBody)
async def abort_weight_update(engine: PatchedEngine, body: AbortUpdateBody) -> None:
    """Drop the session, and the tensors staged in it."""
    await manager_of(engine).inflight.calls.abort(body)


@engine_method(RollbackBody)
async def rollback_weights(engine: PatchedEngine, body: RollbackBody) -> Receipt:
    """Return to the version before the last commit.

    Raises ``Conflict`` if another version than ``expected_version`` is serving.
    """
    return await manager_of(engine).inflight.updates.roll_back(body)


@engine_method(
    JoinGroupBody,
    "master_address",
    "master_port",
    "rank_offset",
    "world_size",
    "group_name",
    "backend",
)
async def init_weights_update_group(engine: PatchedEngine, body: JoinGroupBody) -> tuple[bool, str]:
    """Join a group with a trainer; this engine's ranks count from ``rank_offset``."""
    return await as_sglang_answers(manager_of(engine).inflight.groups.join(body))


@engine_method(LeaveGroupBody, "group_name")
async def destroy_weights_update_group(
    engine: PatchedEngine, body: LeaveGroupBody
) -> tuple[bool, str]:
    """Leave the group with a trainer."""
    return await as_sglang_answers(manager_of(engine).inflight.groups.leave(body))


async def _update(
    engine: PatchedEngine, body: UpdateBody
) -> Receipt | StagedSoFar | SuccessAndMessage:
    return await _answer(manager_of(engine).inflight.calls.update(body), body.non_blocking)


async def _answer(updating: Awaitable[A], non_blocking: bool) -> A | SuccessAndMessage:
    return await updating if non_blocking else await as_sglang_answers(updating)


# ---- adapters ----------------------------------------------------------------------


@engine_method(LoadFolderBody, "lora_name", "lora_path", "pinned", prepare=_say_where)
async def load_lora_adapter(engine: PatchedEngine, body: LoadFolderBody) -> AdapterAnswer:
    """Load an adapter from a folder.

    With ``replace=True`` the adapter may take the name of a loaded one. ``running`` decides about
    the old adapter's requests: they "finish" with it, or "move" to the new one at a step boundary.
    ``kv_cache`` of moved requests is "recompute" (the default) or "fence".
    """
    return await _as_sglang_answers_of_adapters(manager_of(engine).inflight.adapters.load(body))


def _serialize_adapter(engine: PatchedEngine, given: Given) -> Given:
    tensors = given.pop("tensors")
    payloads = engine._serialize_tensors_per_rank(tensors, given.get("load_format"))
    return {**given, "serialized_named_tensors": payloads}


@engine_method(
    LoadTensorsBody,
    "lora_name",
    "tensors",
    "config_dict",
    "load_format",
    prepare=_serialize_adapter,
)
async def load_lora_adapter_from_tensors(
    engine: PatchedEngine, body: LoadTensorsBody
) -> AdapterAnswer:
    """Load an adapter from its tensors, by name. Other fields are as in ``load_lora_adapter``."""
    return await _as_sglang_answers_of_adapters(manager_of(engine).inflight.adapters.load(body))


@engine_method(UnloadAdapterBody, "lora_name")
async def unload_lora_adapter(engine: PatchedEngine, body: UnloadAdapterBody) -> AdapterAnswer:
    """Unload an adapter after its last request; with ``non_blocking`` return at once."""
    return await _as_sglang_answers_of_adapters(manager_of(engine).inflight.adapters.unload(body))


async def _as_sglang_answers_of_adapters(doing: Awaitable[AdapterAnswer]) -> AdapterAnswer:
    """Turn an ``InflightError`` into SGLang's unsuccessful answer."""
    try:
        return await doing
    except InflightError as error:
        return LoRAUpdateOutput(success=False, error_message=str(error))


# ---- caches and memory -------------------------------------------------------------


@engine_method(NoArguments)
async def flush_cache(engine: PatchedEngine, body: NoArguments) -> Any:
    """Forget every cached prefix. The answer says whether running requests prevented this."""
    return await manager_of(engine).flush_cache()


@engine_method(ReleaseMemoryBody, "tags")
async def release_memory_occupation(engine: PatchedEngine, body: ReleaseMemoryBody) -> MemoryMoved:
    """Release the memory of ``tags``: kv_cache, weights, cuda_graph.

    ``keep_weights`` is "host" (weights come back unchanged) or "discard" (the trainer must send
    weights again). Raises ``Conflict`` if requests need the memory: pause with "retract" first.
    """
    return await manager_of(engine).inflight.calls.release_memory(body)


@engine_method(ResumeMemoryBody, "tags")
async def resume_memory_occupation(engine: PatchedEngine, body: ResumeMemoryBody) -> MemoryMoved:
    """Resume the released memory of ``tags``. Raises ``Conflict`` for tags not released."""
    return await manager_of(engine).inflight.calls.resume_memory(body)


METHODS: tuple[EngineMethod[Any], ...] = (
    pause_generation,
    continue_generation,
    is_paused,
    inflight_status,
    update_weights_from_disk,
    update_weights_from_tensor,
    update_weights_from_distributed,
    update_weights_from_ipc,
    begin_weight_update,
    seal_weight_update,
    end_weight_update,
    abort_weight_update,
    rollback_weights,
    init_weights_update_group,
    destroy_weights_update_group,
    load_lora_adapter,
    load_lora_adapter_from_tensors,
    unload_lora_adapter,
    flush_cache,
    release_memory_occupation,
    resume_memory_occupation,
)
