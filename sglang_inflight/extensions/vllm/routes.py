"""vLLM's routes for RL, mapped to our calls. vLLM 0.32 has them in its development mode.

Behaviour of vLLM without an equivalent here is refused with a 501 and the reason.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import ORJSONResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from sglang_inflight.extensions.aborts.aborts import Aborts
from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.memory.front_end import Memory
from sglang_inflight.extensions.vllm.adapters import LoadBody, VLLMAdapters
from sglang_inflight.extensions.vllm.bodies import (
    AbortBody,
    CheckBody,
    FinishBody,
    InitBody,
    PauseQuery,
    ResetCacheBody,
    ResetCacheQuery,
    SleepQuery,
    StartBody,
    VersionBody,
    WorldSizeQuery,
    choose_pause_mode,
)
from sglang_inflight.extensions.vllm.caches import Caches
from sglang_inflight.extensions.vllm.generate import Generate
from sglang_inflight.extensions.vllm.openai_fields import detokenize
from sglang_inflight.extensions.vllm.server_info import ServerInfo, mismatches, read_checksums
from sglang_inflight.extensions.vllm.trainers import (
    CollectiveRPC,
    names_weight_dir,
    update_from_weight_dir,
)
from sglang_inflight.extensions.vllm.transfer import Transfer
from sglang_inflight.frontend.as_sglang import decode, read_query
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.endpoints import (
    Content,
    Endpoint,
    fails_on_shutdown,
    guarded,
    while_connected,
    with_body,
    with_query,
)
from sglang_inflight.frontend.tokenizer_hooks import ROUTES
from sglang_inflight.frontend.updates.version_record import clear_preprocessed
from sglang_inflight.sglang_types import get_device, get_parallel
from sglang_inflight.vocabulary.answers import MEMORY, MemoryMoved
from sglang_inflight.vocabulary.bodies import (
    ContinueBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    UnloadAdapterBody,
)
from sglang_inflight.vocabulary.errors import Conflict, InflightError, NotOffered, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

WAKE_TAGS = ("weights", "kv_cache", "scheduling")

# memory released by /sleep; captured graphs stay, as in vLLM
SLEEP_TAGS = ("kv_cache", "weights")

# vLLM's routes for the calls that our errors name
VLLMS_NAMES = {
    "pause_generation": "/pause",
    "continue_generation": "/resume",
    "release_memory_occupation": "/sleep",
    "resume_memory_occupation": "/wake_up",
    "begin_weight_update": "/start_weight_update",
    "end_weight_update": "/finish_weight_update",
    "init_weights_update_group": "/init_weight_transfer_engine",
    "destroy_weights_update_group": "/shutdown_weight_transfer_engine",
}


@ROUTES.join()
def mount(app: FastAPI, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
    """Put vLLM's routes before SGLang's routes of the same path."""
    routes = _Routes(frontend, tokenizer_manager)
    router = APIRouter(route_class=fails_on_shutdown(frontend.lifetime, VLLMS_NAMES))

    def add(path: str, endpoint: Endpoint, method: str = "POST") -> None:
        router.add_api_route(path, endpoint, methods=[method])

    add("/pause", with_query(PauseQuery, routes.pause))
    add("/resume", guarded(routes.resume))
    add("/abort_requests", guarded(routes.abort_requests, takes_request=True))
    add("/init_weight_transfer_engine", with_body(InitBody, routes.connect))
    add("/shutdown_weight_transfer_engine", guarded(routes.disconnect))
    add("/start_weight_update", with_body(StartBody, routes.start))
    add("/start_draft_weight_update", with_body(StartBody, routes.start_draft))
    add("/update_weights", guarded(routes.update, takes_request=True))
    add("/finish_weight_update", with_body(FinishBody, routes.finish))
    add("/update_weight_version", with_body(VersionBody, routes.name_version))
    add("/weight_info", guarded(routes.weight_info), "GET")
    add("/weight_checker", with_body(CheckBody, routes.check_weights))
    add("/get_world_size", with_query(WorldSizeQuery, routes.world_size), "GET")
    add("/reset_prefix_cache", guarded(routes.reset_prefix_cache, takes_request=True))
    add("/reset_mm_cache", guarded(routes.reset_mm_cache))
    add("/reset_encoder_cache", guarded(routes.reset_encoder_cache))
    add("/sleep", with_query(SleepQuery, routes.sleep))
    add("/wake_up", guarded(routes.wake_up, takes_request=True))
    add("/is_sleeping", guarded(routes.is_sleeping), "GET")
    add("/release_kv_cache_memory", guarded(routes.release_kv_cache))
    add("/collective_rpc", guarded(routes.collective_rpc, takes_request=True))
    adapters = VLLMAdapters(frontend.part(Adapters))
    for prefix in ("", "/v1", "/skyrl/v1"):
        add(f"{prefix}/load_lora_adapter", with_body(LoadBody, adapters.load))
    add("/v1/unload_lora_adapter", with_body(UnloadAdapterBody, adapters.unload))
    for path, for_skyrl in (("/inference/v1/generate", False), ("/skyrl/v1/generate", True)):
        generate = Generate(tokenizer_manager, frontend, for_skyrl=for_skyrl)
        # without admin auth, like /generate, and with the default route class: at a shutdown the
        # request itself is aborted
        router.add_api_route(path, generate.answer, methods=["POST"], route_class_override=APIRoute)
    add("/detokenize", detokenize)
    add("/liveness", routes.liveness, "GET")
    router.add_api_route("/server_info", ServerInfo(tokenizer_manager).answer, response_model=None)
    app.router.routes[:0] = router.routes


class _Routes:
    def __init__(self, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._aborts = frontend.part(Aborts)
        self._ranks = frontend.ranks
        self._pauses = frontend.pauses
        self._caches = Caches(tokenizer_manager, frontend.ranks, frontend.can)
        self._updates = frontend.updates
        self._memory = frontend.part(Memory)
        self._transfer = Transfer(
            frontend.groups,
            frontend.updates,
            backend=dist.get_default_backend_for_device(str(get_device().device)),
            on_cuda=get_device().device == "cuda",
            session_lease_s=frontend.settings.update_timeout_s,
        )
        self._collective_rpc = CollectiveRPC(self._transfer, self._pauses, self._ranks)

    # ---- pauses --------------------------------------------------------------------

    async def pause(self, query: PauseQuery) -> Content:
        mode = choose_pause_mode(query.mode, clears_cache=query.clear_cache)
        answer = await self._pauses.pause(PauseBody(mode=mode))
        if query.clear_cache:
            async with self._pauses.release_on_failure(answer.pause_id):
                await self._caches.flush(retract=True)
        return {**answer, "status": "paused"}

    async def resume(self) -> Content:
        return {**await self._pauses.resume(ContinueBody()), "status": "resumed"}

    async def abort_requests(self, request: Request) -> Content:
        content = await request.body()
        if not content:
            raise Refused("bad request body: there is none. Send {} to abort every request")
        rids = decode(content, AbortBody).request_ids
        if not rids:
            count = len(self._tokenizer_manager.rid_to_state)
            self._tokenizer_manager.abort_request(abort_all=True)
            return {"status": "aborted", "aborted": count}
        return {"status": "aborted", "aborted": await self._aborts.everywhere(rids)}

    # ---- weights -------------------------------------------------------------------

    async def connect(self, body: InitBody) -> Content:
        await self._transfer.connect(body.init_info)
        return {"message": "Weight transfer initialized"}

    async def disconnect(self) -> Content:
        await self._transfer.disconnect()
        return {"message": "Weight transfer shut down"}

    async def start(self, _: StartBody) -> Content:
        await self._transfer.start("target")
        return {"message": "Weight update started"}

    async def start_draft(self, _: StartBody) -> Content:
        await self._transfer.start("draft")
        return {"message": "Draft weight update started"}

    async def update(self, request: Request) -> Content:
        content = await self._whole_body(request)

        async def receive() -> Content:
            if names_weight_dir(content):
                self._transfer.require_no_session()
                receipt = await update_from_weight_dir(self._updates, content)
                return {**receipt.as_json(), "status": "ok"}
            await self._transfer.receive(content)
            return {"message": "Weights updated"}

        return await while_connected(request, receive())

    async def _whole_body(self, request: Request) -> bytes:
        """Return the body; drop the session if the caller leaves before sending all of it."""
        try:
            return await request.body()
        except ClientDisconnect:
            await self._transfer.lose()
            raise

    async def collective_rpc(self, request: Request) -> Content:
        content = await self._whole_body(request)
        return await while_connected(request, self._collective_rpc.call(content))

    async def finish(self, body: FinishBody) -> Content:
        await self._transfer.finish(body.weight_version)
        return {"message": "Weight update finished"}

    async def name_version(self, body: VersionBody) -> Content:
        return await self._updates.rename(body)

    async def weight_info(self) -> Content:
        return {"weight_version": self._tokenizer_manager.config_value("weight_version")}

    async def check_weights(self, body: CheckBody) -> Content:
        if body.action == "reset":
            raise NotOffered("action 'reset' is not offered: it would set served weights to zero")
        if body.action == "compare" and body.baseline is None:
            raise Refused("action 'compare' needs a baseline: pass the checksums of 'checksum'")
        checksums = await read_checksums(self._tokenizer_manager)
        if body.action == "checksum" or body.baseline is None:
            return {"checksums": checksums}
        differ = mismatches(checksums, body.baseline)
        return {"match": not differ, "mismatches": differ}

    async def world_size(self, query: WorldSizeQuery) -> Content:
        if query.include_dp:
            return {"world_size": self._ranks.count}
        parallel = get_parallel()
        return {"world_size": parallel.tp_size * parallel.pp_size}

    async def liveness(self) -> Response:
        """Answer prime-rl: 200 if every rank answers at its next step, else 503."""
        try:
            await self._pauses.ask_status()
        except InflightError:
            return ORJSONResponse({"status": "engine_unresponsive"}, status_code=503)
        return ORJSONResponse({"status": "ok"})

    # ---- caches and sleep ----------------------------------------------------------

    async def reset_prefix_cache(self, request: Request) -> Content:
        """Flush the cache. An external store is refused, also with ``reset_external`` false."""
        query = read_query(request.query_params.multi_items(), ResetCacheQuery)
        # vLLM sends the query, SkyRL a body
        body = decode(await request.body(), ResetCacheBody)
        retract = query.reset_running_requests or body.reset_running_requests
        try:
            await while_connected(request, self._caches.flush(retract=retract))
        except Conflict:
            # vLLM's answer if requests run: the client may retry
            return {"success": False}
        return {"success": True}

    async def reset_mm_cache(self) -> Content:
        clear_preprocessed(self._tokenizer_manager)
        return {}

    async def reset_encoder_cache(self) -> Content:
        await self._caches.forget_embeddings()
        return {}

    async def sleep(self, query: SleepQuery) -> Content:
        """Pause (level 0), or release memory with (1) or without (2) a host copy of the weights."""
        released = await self._memory.released()
        if query.level > 0 and set(SLEEP_TAGS) <= set(released):
            message = f"{', '.join(released)} are asleep already."
            return {"status": "sleeping", "message": message, "paused": True, "level": query.level}
        # requests cannot keep KV that is released
        mode = choose_pause_mode(query.mode, clears_cache=query.level > 0)
        answer = await self._pauses.pause(PauseBody(mode=mode))
        if query.level == 0:
            return {**answer, "status": "sleeping", "level": 0}
        # released memory holds a pause of its own, so this one may be released on a failure
        async with self._pauses.release_on_failure(answer.pause_id):
            moved = await self._memory.release(
                ReleaseMemoryBody(
                    tags=[tag for tag in SLEEP_TAGS if tag not in released],
                    keep_weights="host" if query.level == 1 else "discard",
                )
            )
        memory = {"memory": moved.as_json()["ranks"]}
        return {**answer, **memory, "status": "sleeping", "level": query.level}

    async def wake_up(self, request: Request) -> Content:
        tags = request.query_params.getlist("tags")
        for tag in tags:
            if tag not in WAKE_TAGS:
                raise Refused(f"tags has {tag!r}; there are {', '.join(WAKE_TAGS)}")
        released = await self._memory.released()
        moved = await self._bring_back([tag for tag in released if not tags or tag in tags])
        missing = [tag for tag in released if tags and tag not in tags]
        if missing:
            return {
                "status": "sleeping",
                "message": f"{', '.join(missing)} are still asleep.",
                "paused": True,
                "tags": tags,
            }
        # requests wait for the hollow weights, and continue when an update has filled them
        if moved is not None and moved.hollow is not None:
            await self._release_pauses()
            return {"status": "awake", "message": moved.message, "paused": True, "tags": tags}
        return {
            **await self._pauses.resume(ContinueBody()),
            "status": "awake",
            "tags": tags or None,
        }

    async def _bring_back(self, tags: list[str]) -> MemoryMoved | None:
        if not tags:
            return None
        return await self._memory.resume(ResumeMemoryBody(tags=tags), until_filled=True)

    async def _release_pauses(self) -> None:
        for holder in (await self._pauses.ask_status())[0].pause.holders:
            if holder.pause_id != MEMORY:
                with contextlib.suppress(Conflict):
                    await self._pauses.resume(ContinueBody(pause_id=holder.pause_id))

    async def is_sleeping(self) -> Content:
        return {"is_sleeping": await self._pauses.is_paused()}

    async def release_kv_cache(self) -> Content:
        moved = await self._memory.release(ReleaseMemoryBody(tags=["kv_cache"]))
        return {**moved, "status": "released"}
