"""Tie a ``TokenizerManager`` to its ``Frontend``.

Trainers and gRPC call methods of ``TokenizerManager`` itself, with SGLang's types. The hooks here
take such calls, and answer in SGLang's form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.managers.io_struct import FlushCacheReqOutput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import normalize_serialized_named_tensor_payloads
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_inflight.frontend.abort_hooks import (
    abort_request,
    abort_when_dispatched,
    bind_abort_task,
    end_with_an_empty_chunk,
    join_groups,
    leave_to_the_stream,
    name_groups,
    refuse_without_embedding,
)
from sglang_inflight.frontend.as_sglang import as_sglang_answers, convert
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.gate import pass_gate
from sglang_inflight.frontend.hook_guard import (
    after_if_active,
    before_if_active,
    replace_if_active,
    wrap_if_active,
)
from sglang_inflight.frontend.http.endpoints import decide_request_auth
from sglang_inflight.frontend.http.vllm.openai_fields import (
    build_chat_logprobs,
    note_results,
    write_completion_logprobs,
)
from sglang_inflight.frontend.lora.loading import (
    find_victim,
    load_everywhere,
    refuse_to_unload_in_a_pause,
    stop_unloading_in_a_pause,
)
from sglang_inflight.frontend.openai_requests import handle_request, parse_model_parameter
from sglang_inflight.frontend.request_checks import (
    check_contract,
    check_max_version_lag,
    check_records,
    check_samples,
    check_sampling,
    create_tokenized,
)
from sglang_inflight.frontend.sglangs_pause import CallOriginal
from sglang_inflight.frontend.shutdown import end_pauses, end_schedulers, exit_after_forwarded_calls
from sglang_inflight.frontend.spans import as_sglang_writes_them, write_spans
from sglang_inflight.frontend.workers.folder import ATTRIBUTE, OwnerEndpoint
from sglang_inflight.inactive import children_have_started, why_inactive
from sglang_inflight.late_import import when_imported
from sglang_inflight.messages import KV_VERSIONS, RECORDS
from sglang_inflight.sglang_types import get_context, get_serving
from sglang_inflight.vocabulary.bodies import Body, NameBody
from sglang_inflight.vocabulary.calls import TABLE, Call

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.managers.io_struct import BaseReq
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.frontend.patched_types import PatchedCommunicator, PatchedTokenizerManager
    from sglang_inflight.frontend.workers.forward import Forward
    from sglang_inflight.sglang_types import ServerArgs

HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def create_frontend(
    _: None,
    tokenizer_manager: PatchedTokenizerManager,
    server_args: ServerArgs,
    port_args: PortArgs,
    **kw: Any,
) -> None:
    why = tokenizer_manager.why_inactive = why_inactive()
    # for a launch outside of ``inactive.launching``: the manager is made after all children
    children_have_started()
    if why is not None:
        when_imported(HTTP_SERVER, lambda http_server: _mount_inactive(http_server.app, why))
        return
    frontend = tokenizer_manager.inflight = Frontend(tokenizer_manager)
    if frontend.settings.require_update:
        # a warm-up request would be refused: the weights are hollow
        get_context().override("inflight.require_update", skip_server_warmup=True)
    owner_endpoint: OwnerEndpoint | None = getattr(port_args, ATTRIBUTE, None)
    forward = None
    if owner_endpoint is not None:
        from sglang_inflight.frontend.workers.forward import Forward

        forward = Forward(owner_endpoint.calls)
    when_imported(
        HTTP_SERVER,
        lambda http_server: _mount(http_server, frontend, tokenizer_manager, forward),
    )
    if owner_endpoint is not None and forward is not None:
        from sglang_inflight.frontend.workers.worker import Worker

        frontend.worker = Worker(owner_endpoint, forward, frontend, tokenizer_manager)


def _mount_inactive(app: FastAPI, why: str) -> None:
    from sglang_inflight.frontend.http import inactive

    inactive.mount(app, why)


def _mount(
    http_server: ModuleType,
    frontend: Frontend,
    tokenizer_manager: PatchedTokenizerManager,
    forward: Forward | None,
) -> None:
    from sglang_inflight.frontend.http import generate, ready, routes
    from sglang_inflight.frontend.http.vllm import routes as vllm_routes

    app: FastAPI = http_server.app
    upstreams = len(app.router.routes)
    routes.mount(app, frontend)
    if frontend.settings.vllm_routes:
        vllm_routes.mount(app, frontend, tokenizer_manager)
    generate.mount(app, http_server, frontend)
    ready.mount(app, frontend, tokenizer_manager)
    if forward is not None:
        from sglang_inflight.frontend.workers.forward import mount_abort_request

        ours = app.router.routes[: len(app.router.routes) - upstreams]
        forward.mount(app, ours)
        mount_abort_request(app, tokenizer_manager)
        # a worker's stack was built before its manager; Starlette rebuilds a missing stack
        app.middleware_stack = None
        _check_keys(app)


def _check_keys(app: FastAPI) -> None:
    """Check the admin key in a worker; with a single worker SGLang does so itself."""
    if (key := get_serving().admin_api_key) is not None:
        add_api_key_middleware(app, api_key=None, admin_api_key=key)


def _unless_original(call: Call) -> Callable[..., Any]:
    """Return a hook that takes the call, and lets SGLang's own method take ``CallOriginal``."""

    async def take(
        upstreams: Callable[..., Awaitable[None]],
        tm: PatchedTokenizerManager,
        obj: BaseReq | CallOriginal,
    ) -> None:
        if isinstance(obj, CallOriginal):
            await upstreams(tm, obj.request)
        else:
            await tm.inflight.handlers[call.name](_read(call, obj))

    return take


def _if_memory_can_go(call: Call) -> Callable[..., Any]:
    """Return a hook that takes the call, on servers that can retract requests."""

    async def take(
        upstreams: Callable[..., Awaitable[None]],
        tm: PatchedTokenizerManager,
        obj: BaseReq,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if tm.inflight.can.keep_weights is not None:
            await upstreams(tm, obj, *args, **kwargs)
        else:
            await tm.inflight.handlers[call.name](_read(call, obj))

    return take


def _returning_a_pair(call: Call) -> Callable[..., Any]:
    """Return a replacement of SGLang's method."""

    async def take(tm: PatchedTokenizerManager, obj: BaseReq, request: object = None) -> Any:
        return await as_sglang_answers(call, tm.inflight.handlers[call.name](_read(call, obj)))

    return take


def _read(call: Call, obj: Any) -> Body:
    """Convert SGLang's message to our body, a superset of its fields."""
    known = call.body.__struct_fields__
    fields = {name: getattr(obj, name) for name in obj.__struct_fields__ if name in known}
    if call.name == "update_weights_from_tensor":
        payloads = normalize_serialized_named_tensor_payloads(obj.serialized_named_tensors)
        fields["serialized_named_tensors"] = payloads
    return convert(fields, call.body, "request")


async def update_weight_version(tm: PatchedTokenizerManager, obj: BaseReq) -> None:
    """Rename without aborting requests: in SGLang the route aborts them, not this method."""
    body = NameBody(new_version=cast("Any", obj).new_version, abort_all_requests=False)
    await tm.inflight.handlers["update_weight_version"](body)


async def flush_cache(
    flush: Callable[..., Awaitable[Any]], tm: PatchedTokenizerManager, *args: Any, **kwargs: Any
) -> Any:
    if tm.inflight.handlers.skips_flush():
        return FlushCacheReqOutput(success=True)
    return await flush(tm, *args, **kwargs)


def is_ready(ready: Callable[[Any], bool], tm: PatchedTokenizerManager) -> bool:
    """Return false while each request would end with 503: hollow weights, or behind the fleet."""
    return ready(tm) and tm.inflight.why_not_ready() is None


def generate_request(
    generate: Callable[..., AsyncGenerator[Any, None]],
    tm: PatchedTokenizerManager,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[Any, None]:
    return pass_gate(tm.inflight, note_results(generate, tm, obj, request), obj, request)


def refuse_when_over(tm: PatchedTokenizerManager, *args: Any) -> None:
    tm.inflight.lifetime.require()


def take_values_of_requests(
    accumulate: Callable[..., None],
    tm: PatchedTokenizerManager,
    meta_info: dict[str, Any],
    state: object,
    customized_info: dict[str, list[Any]],
    index: int,
    *args: Any,
) -> None:
    """Store one value per request. SGLang would take it for a list with a value per token."""
    rest = dict(customized_info)
    for key in _OF_REQUESTS:
        values = rest.pop(key, None)
        if values is not None and values[index] is not None and not as_sglang_writes_them():
            meta_info[key] = values[index]
    accumulate(tm, meta_info, state, rest, index, *args)


async def send_control_call(communicator: PatchedCommunicator, obj: Any) -> list[Any]:
    """Replace ``FanOutCommunicator.queueing_call``."""
    return await communicator.inflight.call(communicator, obj)


def take_control_answer(communicator: PatchedCommunicator, recv_obj: Any) -> None:
    """Replace ``FanOutCommunicator.handle_recv``."""
    communicator.inflight.take_answer(recv_obj)


_OF_REQUESTS = (KV_VERSIONS, RECORDS)
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_COMMUNICATOR = "sglang.srt.managers.communicator.FanOutCommunicator"
_OPENAI_SERVING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"

HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_TOKENIZER_MANAGER}.__init__", create_frontend, HookType.AFTER),
    (
        "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler",
        *after_if_active(end_pauses),
    ),
    (f"{_TOKENIZER_MANAGER}.sigterm_watchdog", *wrap_if_active(exit_after_forwarded_calls)),
    (f"{_TOKENIZER_MANAGER}._dispatch_to_scheduler", *wrap_if_active(end_schedulers)),
    *(
        (f"{_TOKENIZER_MANAGER}.{name}", *wrap_if_active(load_everywhere))
        for name in ("load_lora_adapter", "load_lora_adapter_from_tensors")
    ),
    (f"{_TOKENIZER_MANAGER}.unload_lora_adapter", *wrap_if_active(refuse_to_unload_in_a_pause)),
    (
        f"{_TOKENIZER_MANAGER}._unload_lora_adapter_locked",
        *wrap_if_active(stop_unloading_in_a_pause),
    ),
    (
        "sglang.srt.lora.lora_registry.LoRARegistry.lru_lora_name",
        *replace_if_active(find_victim),
    ),
    (f"{_TOKENIZER_MANAGER}.generate_request", *wrap_if_active(generate_request)),
    (f"{_TOKENIZER_MANAGER}._init_req_state", *before_if_active(refuse_when_over)),
    (f"{_TOKENIZER_MANAGER}._init_req_state", *after_if_active(join_groups)),
    (f"{_TOKENIZER_MANAGER}.abort_request", *wrap_if_active(abort_request)),
    (f"{_TOKENIZER_MANAGER}._mark_state_dispatched", *after_if_active(abort_when_dispatched)),
    (
        f"{_TOKENIZER_MANAGER}._handle_abort_finish_reason",
        *before_if_active(refuse_without_embedding),
    ),
    (f"{_TOKENIZER_MANAGER}.create_abort_task", *wrap_if_active(bind_abort_task)),
    (
        "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._abort_request_id",
        *replace_if_active(leave_to_the_stream),
    ),
    (
        "sglang.srt.managers.io_struct.GenerateReqInput._normalize_rid",
        name_groups,
        HookType.BEFORE,
    ),
    (f"{_TOKENIZER_MANAGER}._handle_abort_req", *wrap_if_active(end_with_an_empty_chunk)),
    *(
        (f"{_TOKENIZER_MANAGER}.{surround.__name__}", *wrap_if_active(surround))
        for surround in (
            flush_cache,
            is_ready,
        )
    ),
    *(
        (f"{_TOKENIZER_MANAGER}.{name}", *wrap_if_active(surround(TABLE[name])))
        for name, surround in {
            "pause_generation": _unless_original,
            "continue_generation": _unless_original,
            "release_memory_occupation": _if_memory_can_go,
            "resume_memory_occupation": _if_memory_can_go,
        }.items()
    ),
    (f"{_COMMUNICATOR}.queueing_call", *replace_if_active(send_control_call)),
    (f"{_COMMUNICATOR}.handle_recv", *replace_if_active(take_control_answer)),
    (f"{_TOKENIZER_MANAGER}.update_request_meta_info", *wrap_if_active(take_values_of_requests)),
    ("sglang.srt.utils.auth.decide_request_auth", decide_request_auth, HookType.AROUND),
    # these belong to no manager, and read the process's why_inactive()
    (
        "sglang.srt.managers.tokenizer_manager.add_weight_versions_to_meta_info",
        write_spans,
        HookType.AROUND,
    ),
    *(
        ("sglang.srt.sampling.sampling_params.SamplingParams.verify", check, HookType.BEFORE)
        for check in (check_max_version_lag, check_contract)
    ),
    ("sglang.srt.sampling.sampling_params.SamplingParams.verify", check_records, HookType.BEFORE),
    (f"{_TOKENIZER_MANAGER}._create_tokenized_object", *wrap_if_active(create_tokenized)),
    (f"{_OPENAI_SERVING}.handle_request", *wrap_if_active(handle_request)),
    (f"{_OPENAI_SERVING}._parse_model_parameter", *wrap_if_active(parse_model_parameter)),
    (
        "sglang.srt.entrypoints.openai.utils.to_openai_style_logprobs",
        write_completion_logprobs,
        HookType.AROUND,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
        "._build_token_logprobs_from_raw",
        build_chat_logprobs,
        HookType.AROUND,
    ),
    (
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        check_sampling,
        HookType.BEFORE,
    ),
    (
        "sglang.srt.managers.io_struct.GenerateReqInput._handle_parallel_sampling",
        check_samples,
        HookType.AFTER,
    ),
    (f"{_TOKENIZER_MANAGER}.update_weight_version", *replace_if_active(update_weight_version)),
    *(
        (f"{_TOKENIZER_MANAGER}.{call.name}", *replace_if_active(_returning_a_pair(call)))
        for call in TABLE.values()
        if call.answers_pair
    ),
]
