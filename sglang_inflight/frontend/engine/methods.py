"""What ``sglang.Engine`` can be asked for besides generating.

A call with ``non_blocking=True`` returns the receipt, and raises what HTTP answers with. One
without returns upstream's ``(success, message)``, and from disk ``(success, message, 0)``,
because upstream counts paused requests there, and never did. Arguments that cannot be are
raised by both.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.utils import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

from sglang_inflight.errors import InflightError
from sglang_inflight.frontend.as_sglang_answers import SuccessAndMessage, as_sglang_answers
from sglang_inflight.frontend.bodies import (
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
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    RollbackBody,
    SealBody,
    TensorBody,
    UpdateBody,
)
from sglang_inflight.frontend.engine.arguments import Given
from sglang_inflight.frontend.engine.method import EngineMethod, engine_method, manager_of
from sglang_inflight.frontend.lora.bodies import LoadFolderBody, LoadTensorsBody, UnloadAdapterBody
from sglang_inflight.grants import (
    Deferred,
    Grant,
    MemoryMoved,
    NamelessGrant,
    Release,
    WindowGrant,
    WindowRelease,
)
from sglang_inflight.messages import FLATTENED_BUCKET
from sglang_inflight.receipt import Begun, Receipt, StagedSoFar
from sglang_inflight.sglang_types.runtime_context import get_parallel
from sglang_inflight.status import Status, describe_inactive

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine
    from sglang_inflight.frontend.sglang_types.lora_registry import AdapterAnswer

Outcome = Receipt | StagedSoFar | Begun | Deferred | SuccessAndMessage | tuple[bool, str, int]


A = TypeVar("A", bound=Receipt | StagedSoFar | Begun | Deferred)


class NoArguments(Body, kw_only=True):
    pass


# ---- pauses ------------------------------------------------------------------------


@engine_method(PauseBody, "mode")
async def pause_generation(
    engine: PatchedEngine, body: PauseBody
) -> Grant | NamelessGrant | WindowGrant:
    """Pause generation, or renew a pause. Returns when every rank stands still.

    ``mode`` is "abort" (if left out), "in_place", "retract" or "wait". The answer has the
    ``pause_id``, by which it is renewed and let go of; ``new_id`` chooses it. ``lease_s``
    seconds after the last renewal generation continues by itself. ``timeout_s`` bounds how
    long "wait" waits.

    Raises ``Conflict`` where ``pause_id`` is not held any more.
    """
    return await manager_of(engine).inflight.calls.pause(body)


@engine_method(ContinueBody)
async def continue_generation(engine: PatchedEngine, body: ContinueBody) -> Release | WindowRelease:
    """Let go of the pause ``pause_id``, or of all; generation goes on when none is left.

    Raises ``Conflict`` where ``pause_id`` is not held any more.
    """
    return await manager_of(engine).inflight.calls.resume(body)


@engine_method(NoArguments)
async def is_paused(engine: PatchedEngine, body: NoArguments) -> bool:
    """Whether a pause holds now. Raises ``Conflict`` where the replicas differ."""
    return await manager_of(engine).inflight.calls.is_paused()


@engine_method(NoArguments, without_us=describe_inactive)
async def inflight_status(engine: PatchedEngine, body: NoArguments) -> Status:
    """State, holders, versions and staging: of the first rank, and in ``ranks`` of each.

    Of an engine that runs without SGLang Inflight: ``{"active": False}``, and why.
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
    """Update from a checkpoint's folder: a whole one, unless ``partial`` is true.

    docs/api.md has a table of the fields. With ``non_blocking=True`` requests run on
    meanwhile and the receipt is returned.
    """
    outcome = await _update(engine, body)
    return (*outcome, 0) if isinstance(outcome, tuple) else outcome


def _serialize(engine: PatchedEngine, given: Given) -> Given:
    """One payload per rank: a payload may be readable only once."""
    tensors = given.pop("named_tensors")
    if given.get("load_format") == FLATTENED_BUCKET:
        payloads = normalize_serialized_named_tensor_payloads(tensors)
    else:
        ranks = manager_of(engine).inflight.ranks.all
        if get_parallel().nnodes == 1:
            payloads = [MultiprocessingSerializer.serialize(tensors) for _ in ranks]
        else:
            # what that makes is a handle, which is none on another machine; this one can be read
            # by each replica and stage
            payloads = [_by_value(tensors)] * len({tp_rank for _, _, tp_rank in ranks})
    return {**given, "serialized_named_tensors": payloads}


def _by_value(tensors: Iterable[tuple[str, Any]]) -> bytes:
    return pickle.dumps(
        [
            # a copy, because a view brings all that it is a view of
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
    """Upstream takes the dtypes themselves, too."""
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
    """Update from what rank 0 of ``group_name`` broadcasts.

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

    With ``non_blocking=True`` it returns the answer of HTTP, which has the ``session_id``;
    ``new_id`` chooses it. With ``session_id`` it renews that session's lease.
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

    Raises ``Conflict`` where another version than ``expected_version`` is serving.
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
    """Join a group with a trainer, whose ranks count from ``rank_offset``."""
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

    With ``replace=True`` it may take the name from the adapter that has it. ``running`` says
    what becomes of requests of that one: they "finish" with it, or "move" to the new one at a
    step boundary; ``kv_cache`` of those that move is "recompute" (if left out) or "fence".
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
    """Load an adapter from its tensors, by name. The other fields are as of a folder."""
    return await _as_sglang_answers_of_adapters(manager_of(engine).inflight.adapters.load(body))


@engine_method(UnloadAdapterBody, "lora_name")
async def unload_lora_adapter(engine: PatchedEngine, body: UnloadAdapterBody) -> AdapterAnswer:
    """Unload an adapter when its last request has ended; ``non_blocking`` waits for none."""
    return await _as_sglang_answers_of_adapters(manager_of(engine).inflight.adapters.unload(body))


async def _as_sglang_answers_of_adapters(doing: Awaitable[AdapterAnswer]) -> AdapterAnswer:
    """It raises nothing that is an answer."""
    try:
        return await doing
    except InflightError as error:
        return LoRAUpdateOutput(success=False, error_message=str(error))


# ---- what is upstream's own --------------------------------------------------------


@engine_method(NoArguments)
async def flush_cache(engine: PatchedEngine, body: NoArguments) -> Any:
    """Forget every cached prefix. The answer says whether requests kept it from that."""
    return await manager_of(engine).flush_cache()


@engine_method(ReleaseMemoryBody, "tags")
async def release_memory_occupation(engine: PatchedEngine, body: ReleaseMemoryBody) -> MemoryMoved:
    """Give back the memory of ``tags``, of which there are kv_cache, weights, cuda_graph.

    ``keep_weights`` is "host" (they come back as they were) or "discard" (they are to be sent).
    Raises ``Conflict`` where requests need it: pause with "retract" first.
    """
    return await manager_of(engine).inflight.calls.release_memory(body)


@engine_method(ResumeMemoryBody, "tags")
async def resume_memory_occupation(engine: PatchedEngine, body: ResumeMemoryBody) -> MemoryMoved:
    """Take back the memory of ``tags`` that were released. Raises ``Conflict`` for others."""
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
