"""``sglang.Engine``: pauses and updates, sync and async.

A call with ``non_blocking=True`` returns the receipt, and raises ``Refused`` (or a child)
where nothing was changed. One without returns upstream's ``(success, message)``, and from
disk ``(success, message, 0)``, because upstream counts paused requests there, and never did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

from sglang_inflight.frontend.bodies import (
    AbortUpdateBody,
    BeginBody,
    DiskBody,
    DistributedBody,
    EndBody,
    IPCBody,
    OnBusy,
    RollbackBody,
    SealBody,
    TensorBody,
    UpdateBody,
)
from sglang_inflight.frontend.receipt import Receipt, settle
from sglang_inflight.frontend.shared_loop import share
from sglang_inflight.messages import KVPolicy, PauseMode, Selector
from sglang_inflight.unsupported import refuse_at_start

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

Outcome = Receipt | tuple[bool, str] | tuple[bool, str, int]


def share_the_loop(loop: Any) -> None:
    """Not a hook of ``Engine.__init__``, because that is what loads the plugins."""
    share(loop)


# ---- pauses ------------------------------------------------------------------------


async def async_pause_generation(
    engine: Engine,
    mode: PauseMode | None = None,
    *,
    pause_id: str | None = None,
    lease_s: float | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """See ``Pauses.pause``."""
    answer: dict[str, Any] = await engine.tokenizer_manager.inflight.pauses.pause(
        mode, pause_id=pause_id, lease_s=lease_s, timeout_s=timeout_s
    )
    return answer


async def async_continue_generation(
    engine: Engine, *, pause_id: str | None = None, torch_empty_cache: bool = True
) -> dict[str, Any]:
    """See ``Pauses.resume``."""
    answer: dict[str, Any] = await engine.tokenizer_manager.inflight.pauses.resume(
        pause_id=pause_id, torch_empty_cache=torch_empty_cache
    )
    return answer


async def async_inflight_status(engine: Engine) -> dict[str, Any]:
    """See ``Frontend.status``."""
    status: dict[str, Any] = await engine.tokenizer_manager.inflight.status()
    return status


# ---- updates -----------------------------------------------------------------------


async def async_update_weights_from_disk(
    engine: Engine,
    model_path: str,
    load_format: str | None = None,
    *,
    flush_cache: bool = True,
    weight_version: str | None = None,
    non_blocking: bool = False,
    kv_cache: KVPolicy | None = None,
    expected_version: str | None = None,
    partial: bool | None = None,
    on_busy: OnBusy = "wait",
    timeout_s: float | None = None,
    session_id: str | None = None,
    selector: Selector | None = None,
) -> Outcome:
    """Update from a checkpoint directory, whole unless ``partial``."""
    outcome = await _update(
        engine,
        DiskBody(
            model_path=model_path,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            non_blocking=non_blocking,
            kv_cache=kv_cache,
            expected_version=expected_version,
            partial=partial,
            on_busy=on_busy,
            timeout_s=timeout_s,
            session_id=session_id,
            selector=selector,
        ),
    )
    if isinstance(outcome, tuple):
        return outcome[0], outcome[1], 0
    return outcome


async def async_update_weights_from_tensor(
    engine: Engine,
    named_tensors: list[tuple[str, torch.Tensor]] | list[Any],
    load_format: str | None = None,
    flush_cache: bool = True,
    *,
    weight_version: str | None = None,
    non_blocking: bool = False,
    kv_cache: KVPolicy | None = None,
    expected_version: str | None = None,
    partial: bool | None = None,
    on_busy: OnBusy = "wait",
    timeout_s: float | None = None,
    session_id: str | None = None,
    selector: Selector | None = None,
) -> Outcome:
    """Update from ``(name, tensor)`` pairs, or from one serialized payload per rank."""
    return await _update(
        engine,
        TensorBody(
            serialized_named_tensors=_serialize(named_tensors, load_format),
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            non_blocking=non_blocking,
            kv_cache=kv_cache,
            expected_version=expected_version,
            partial=partial,
            on_busy=on_busy,
            timeout_s=timeout_s,
            session_id=session_id,
            selector=selector,
        ),
    )


async def async_update_weights_from_distributed(
    engine: Engine,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str = "weight_update_group",
    flush_cache: bool = True,
    load_format: str | None = None,
    *,
    weight_version: str | None = None,
    non_blocking: bool = False,
    kv_cache: KVPolicy | None = None,
    expected_version: str | None = None,
    partial: bool | None = None,
    on_busy: OnBusy = "wait",
    timeout_s: float | None = None,
    session_id: str | None = None,
    selector: Selector | None = None,
) -> Outcome:
    """Update from what rank 0 of ``group_name`` broadcasts."""
    return await _update(
        engine,
        DistributedBody(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            flush_cache=flush_cache,
            load_format=load_format,
            weight_version=weight_version,
            non_blocking=non_blocking,
            kv_cache=kv_cache,
            expected_version=expected_version,
            partial=partial,
            on_busy=on_busy,
            timeout_s=timeout_s,
            session_id=session_id,
            selector=selector,
        ),
    )


async def async_update_weights_from_ipc(
    engine: Engine,
    zmq_handles: dict[str, str],
    flush_cache: bool = True,
    *,
    weight_version: str | None = None,
    non_blocking: bool = False,
    kv_cache: KVPolicy | None = None,
    expected_version: str | None = None,
    partial: bool | None = None,
    on_busy: OnBusy = "wait",
    timeout_s: float | None = None,
    session_id: str | None = None,
    selector: Selector | None = None,
) -> Outcome:
    """Update from a checkpoint-engine process."""
    return await _update(
        engine,
        IPCBody(
            zmq_handles=zmq_handles,
            flush_cache=flush_cache,
            weight_version=weight_version,
            non_blocking=non_blocking,
            kv_cache=kv_cache,
            expected_version=expected_version,
            partial=partial,
            on_busy=on_busy,
            timeout_s=timeout_s,
            session_id=session_id,
            selector=selector,
        ),
    )


async def async_begin_weight_update(
    engine: Engine,
    selector: Selector = "all",
    *,
    non_blocking: bool = False,
    expected_version: str | None = None,
    partial: bool = True,
    on_busy: OnBusy = "wait",
    lease_s: float | None = None,
    session_id: str | None = None,
) -> Outcome:
    """Open a session: its calls go live together, at ``end_weight_update``.

    With ``non_blocking=True`` it returns the answer of HTTP, which has the ``session_id``.
    With that ``session_id`` it renews the session's lease.
    """
    body = BeginBody(
        selector=selector,
        non_blocking=non_blocking,
        expected_version=expected_version,
        partial=partial,
        on_busy=on_busy,
        lease_s=lease_s,
        session_id=session_id,
    )
    return await _settle(engine.tokenizer_manager.inflight.updates.begin(body), non_blocking)


async def async_seal_weight_update(engine: Engine, *, session_id: str | None = None) -> Receipt:
    """Check the session and vote for it on every rank, without committing it."""
    body = SealBody(session_id=session_id)
    receipt: Receipt = await engine.tokenizer_manager.inflight.updates.seal(body)
    return receipt


async def async_end_weight_update(
    engine: Engine,
    *,
    non_blocking: bool = False,
    weight_version: str | None = None,
    flush_cache: bool | None = None,
    kv_cache: KVPolicy | None = None,
    session_id: str | None = None,
) -> Outcome:
    """Commit the session on every rank."""
    body = EndBody(
        session_id=session_id,
        non_blocking=non_blocking,
        weight_version=weight_version,
        flush_cache=flush_cache,
        kv_cache=kv_cache,
    )
    return await _settle(engine.tokenizer_manager.inflight.updates.end(body), non_blocking)


async def async_abort_weight_update(engine: Engine, *, session_id: str | None = None) -> None:
    """Drop the session, and the tensors staged in it."""
    body = AbortUpdateBody(session_id=session_id)
    await engine.tokenizer_manager.inflight.updates.abort(body)


async def async_rollback_weights(
    engine: Engine,
    *,
    weight_version: str | None = None,
    flush_cache: bool = False,
    kv_cache: KVPolicy | None = None,
) -> Receipt:
    """Return to the version before the last commit."""
    body = RollbackBody(weight_version=weight_version, flush_cache=flush_cache, kv_cache=kv_cache)
    receipt: Receipt = await engine.tokenizer_manager.inflight.updates.roll_back(body)
    return receipt


async def _update(engine: Engine, body: UpdateBody) -> Outcome:
    return await _settle(engine.tokenizer_manager.inflight.updates.update(body), body.non_blocking)


async def _settle(updating: Any, non_blocking: bool) -> Outcome:
    if non_blocking:
        receipt: Receipt = await updating
        return receipt
    return await settle(updating)


def _serialize(tensors: list[Any], load_format: str | None) -> list[bytes]:
    """One payload per rank of each replica: a payload may be readable only once."""
    if load_format == "flattened_bucket":
        return normalize_serialized_named_tensor_payloads(tensors)
    parallel = get_parallel()
    replicas = 1 if parallel.attn_dp_enabled else parallel.dp_size
    return [
        MultiprocessingSerializer.serialize(tensors) for _ in range(parallel.tp_size * replicas)
    ]


# ---- installation ------------------------------------------------------------------

_ASYNC: tuple[Callable[..., Any], ...] = (
    async_pause_generation,
    async_continue_generation,
    async_inflight_status,
    async_update_weights_from_disk,
    async_update_weights_from_tensor,
    async_update_weights_from_distributed,
    async_update_weights_from_ipc,
    async_begin_weight_update,
    async_seal_weight_update,
    async_end_weight_update,
    async_abort_weight_update,
    async_rollback_weights,
)


def _wait_for(async_method: Callable[..., Any]) -> Callable[..., Any]:
    def method(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        return engine.loop.run_until_complete(async_method(engine, *args, **kwargs))

    method.__name__ = method.__qualname__ = async_method.__name__.removeprefix("async_")
    method.__doc__ = async_method.__doc__
    return method


_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_SYNC = [_wait_for(method) for method in _ASYNC]


def add_methods() -> None:
    """Give ``Engine`` the methods that upstream's does not have."""
    from sglang.srt.entrypoints.engine import Engine

    for method in (*_ASYNC, *_SYNC):
        if not hasattr(Engine, method.__name__):
            setattr(Engine, method.__name__, method)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_ENGINE}._launch_subprocesses", refuse_at_start, HookType.BEFORE),
    (f"{_ENGINE}._ensure_event_loop", share_the_loop, HookType.AFTER),
    *(
        (f"{_ENGINE}.{method.__name__}", method, HookType.REPLACE)
        for method in _SYNC
        if method.__name__
        in {
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "begin_weight_update",
            "end_weight_update",
        }
    ),
]
