"""Tie a ``TokenizerManager`` to its ``Frontend``.

Trainers and gRPC call methods of ``TokenizerManager`` itself, with SGLang's types. The hooks here
take such calls, and answer in SGLang's form.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.managers.io_struct import FlushCacheReqOutput
from sglang.srt.utils import normalize_serialized_named_tensor_payloads

from sglang_inflight.frontend.as_sglang import as_sglang_answers, convert
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.sglangs_pause import CallOriginal
from sglang_inflight.frontend.spans import as_sglang_writes_them
from sglang_inflight.hooking import (
    AFTER,
    AROUND,
    REPLACE,
    TOKENIZER_MANAGER,
    hook,
    hook_each,
    with_us,
)
from sglang_inflight.inactive import children_have_started, why_inactive
from sglang_inflight.joints import Joint
from sglang_inflight.late_import import when_imported
from sglang_inflight.messages import KV_VERSIONS
from sglang_inflight.settings import extensions_on
from sglang_inflight.sglang_types import get_context
from sglang_inflight.vocabulary.bodies import Body, NameBody
from sglang_inflight.vocabulary.calls import TABLE, Call

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.managers.io_struct import BaseReq
    from sglang.srt.server_args import PortArgs
    from starlette.routing import BaseRoute

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import ServerArgs, TokenizerManager

HTTP_SERVER = "sglang.srt.entrypoints.http_server"

# puts routes before SGLang's routes of the same path, or a middleware behind ours
ROUTES: Joint[Callable[[FastAPI, Frontend, TokenizerManager], None]] = Joint("routes")
# changes the app with our routes, the list
MOUNTED: Joint[
    Callable[[FastAPI, Sequence[BaseRoute], PatchedTokenizerManager, PortArgs], None]
] = Joint("mounted")
# takes part in a new front end, whose routes are mounted if the app is there
FRONT_ENDS: Joint[Callable[[Frontend, PatchedTokenizerManager, PortArgs], None]] = Joint(
    "front ends"
)


@hook(f"{TOKENIZER_MANAGER}.__init__", AFTER)
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
    when_imported(
        HTTP_SERVER,
        lambda http_server: _mount(http_server, frontend, tokenizer_manager, port_args),
    )
    for take_part in FRONT_ENDS:
        take_part(frontend, tokenizer_manager, port_args)


def _mount_inactive(app: FastAPI, why: str) -> None:
    from sglang_inflight.frontend.http import inactive

    inactive.mount(app, why)


def _mount(
    http_server: ModuleType,
    frontend: Frontend,
    tokenizer_manager: PatchedTokenizerManager,
    port_args: PortArgs,
) -> None:
    from sglang_inflight.frontend.http import ready, routes
    from sglang_inflight.frontend.requests import doors

    app: FastAPI = http_server.app
    upstreams = len(app.router.routes)
    routes.mount(app, frontend)
    for add_routes in ROUTES:
        add_routes(app, frontend, tokenizer_manager)
    doors.mount_generate(app, http_server, frontend)
    ready.mount(app, frontend, tokenizer_manager)
    ours = app.router.routes[: len(app.router.routes) - upstreams]
    for change in MOUNTED:
        change(app, ours, tokenizer_manager, port_args)


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


@hook(f"{TOKENIZER_MANAGER}.update_weight_version", REPLACE, when=with_us)
async def update_weight_version(tm: PatchedTokenizerManager, obj: BaseReq) -> None:
    """Rename without aborting requests: in SGLang the route aborts them, not this method."""
    body = NameBody(new_version=cast("Any", obj).new_version, abort_all_requests=False)
    await tm.inflight.handlers["update_weight_version"](body)


@hook("sglang.srt.utils.common.build_server_info", AFTER, order=1)
def name_served_version(
    info: dict[str, Any], server_args: ServerArgs, scheduler_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the served version in ``/server_info``: gateways read a server's version there."""
    return {**info, "weight_version": get_context().config_leaf("weight_version")}


@hook(f"{TOKENIZER_MANAGER}.flush_cache", AROUND, when=with_us)
async def flush_cache(
    flush: Callable[..., Awaitable[Any]], tm: PatchedTokenizerManager, *args: Any, **kwargs: Any
) -> Any:
    if tm.inflight.handlers.skips_flush():
        return FlushCacheReqOutput(success=True)
    return await flush(tm, *args, **kwargs)


@hook(f"{TOKENIZER_MANAGER}.is_ready", AROUND, when=with_us)
def is_ready(ready: Callable[[Any], bool], tm: PatchedTokenizerManager) -> bool:
    """Return false while each request would end with 503: hollow weights, or behind the fleet."""
    return ready(tm) and tm.inflight.why_not_ready() is None


@hook(f"{TOKENIZER_MANAGER}.update_request_meta_info", AROUND, when=with_us)
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
    for key in _of_requests():
        values = rest.pop(key, None)
        if values is not None and values[index] is not None and not as_sglang_writes_them():
            meta_info[key] = values[index]
    accumulate(tm, meta_info, state, rest, index, *args)


@functools.cache
def _of_requests() -> tuple[str, ...]:
    """Return the fields of ``meta_info`` with one value for a request."""
    return KV_VERSIONS, *(name for extension in extensions_on() for name in extension.answers)


hook_each(
    __name__,
    {
        f"{TOKENIZER_MANAGER}.{name}": surround(TABLE[name])
        for name, surround in {
            "pause_generation": _unless_original,
            "continue_generation": _unless_original,
            "release_memory_occupation": _if_memory_can_go,
            "resume_memory_occupation": _if_memory_can_go,
        }.items()
    },
    AROUND,
    when=with_us,
)
hook_each(
    __name__,
    {
        f"{TOKENIZER_MANAGER}.{call.name}": _returning_a_pair(call)
        for call in TABLE.values()
        if call.answers_pair
    },
    REPLACE,
    when=with_us,
)
