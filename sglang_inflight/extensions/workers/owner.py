"""The owner of pauses, turns, sessions and leases, on a server with several tokenizer workers.

With ``--tokenizer-worker-num`` above 1 SGLang takes HTTP in several processes, each with a
``TokenizerManager``. The launching process has none, and routes messages between the workers and
the schedulers. The launching process lives as long as the server, so the owner runs there: one more
``TokenizerManager`` without requests, on its own event loop and thread, with the same ``Frontend``
as on a server with one worker. Workers forward control calls to the owner as HTTP
(``forward.py``). So the owner answers on the same routes, reads the bodies, and sees a caller
disconnect. A dying worker ends its connections, and nothing else.

Every worker knows a call's effects before the call is answered (``state_broadcast.py``): the owner
holds its answer back until all workers have acked. So after a receipt every worker names the
receipt's version.

The owner's messages go through SGLang's router, and answers come back to the owner's own socket.
Ranks' unsolicited messages go to that socket, too (``hooks.py``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import logging
import socket
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from fastapi import FastAPI, Query, Response
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.workers.folder import OwnerEndpoint, OwnersFolder
from sglang_inflight.extensions.workers.forward import FLUSH, mount_aborts, mount_reloads
from sglang_inflight.extensions.workers.protocol import LONGEST_LINE, Adapter, ServerState
from sglang_inflight.extensions.workers.refcounts import OwnersRegistry
from sglang_inflight.extensions.workers.shutdown_signal import ShutdownSignal
from sglang_inflight.extensions.workers.state_broadcast import StateBroadcast
from sglang_inflight.frontend.shutdown import release_all

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import ServerArgs

logger = logging.getLogger(__name__)

# with workers, SGLang's HTTP app is not served in the launching process
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
START_TIMEOUT_S = 60.0


class Preprocessed:
    """Stand-in for the image processor: counts cache clears, for workers to repeat."""

    def __init__(self) -> None:
        self.forgotten = 0

    def clear_preprocess_cache(self) -> None:
        self.forgotten += 1


class OwnersManager(TokenizerManager):
    """A ``TokenizerManager`` without requests, tokenizer and processors."""

    broadcast: StateBroadcast | None = None
    lora_registry: LoRARegistry

    def init_tokenizer_and_processor(self) -> None:
        absent: Any = None
        self.tokenizer = self.processor = self.mm_processor = absent
        self.async_dynamic_batch_tokenizer = absent

    def init_positional_embeds_transport(self) -> None:
        pass

    def init_disaggregation(self, **_: Any) -> None:
        """Do nothing: the router has started the server's bootstrap service."""

    def init_lora(self) -> None:
        super().init_lora()
        adapters = list(self.lora_registry.get_all_adapters().values())
        self.lora_registry = OwnersRegistry(adapters, self._until_known)

    async def _until_known(self) -> None:
        assert self.broadcast is not None
        await self.broadcast.wait_acked()

    def record_config_updates(self, source: str, **fields: Any) -> None:
        super().record_config_updates(source, **fields)
        if self.broadcast is not None:
            self.broadcast.post()

    async def sigterm_watchdog(self) -> None:
        """Do nothing: the workers end the server after their last request."""


class Owner:
    """The owner, created on the main thread, and running on its own thread and event loop."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self._folder = OwnersFolder()
        self.owner_endpoint = OwnerEndpoint(self._folder.path)
        self._server_args = server_args
        self._port_args = copy.copy(port_args)
        self._port_args.tokenizer_ipc_name = f"ipc://{self.owner_endpoint.folder / 'answers'}"
        self._preprocessed = Preprocessed()
        self._shutdown_signal = ShutdownSignal()
        self._serves: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def answers(self) -> str:
        """Address for the ranks' answers."""
        return self._port_args.tokenizer_ipc_name

    def start(self) -> None:
        """Start the owner and wait until it takes workers' calls. Raises if the start failed."""
        threading.Thread(target=self._run, name="inflight-owner", daemon=True).start()
        self._serves.result(START_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._serves.done():
                logger.critical("The owner of the server's state has ended.", exc_info=error)
            else:
                self._serves.set_exception(error)

    async def _serve(self) -> None:
        # the manager's ``Frontend`` adds our routes to SGLang's app
        made: Any = OwnersManager(
            self._server_args, self._port_args, start_pd_bootstrap_service=False
        )
        manager: PatchedTokenizerManager = made
        made.mm_processor = self._preprocessed
        manager.auto_create_handle_loop()
        broadcast = StateBroadcast(
            lambda: self._state(manager),
            made.lora_registry.count,
            lambda: manager._dispatch_to_scheduler(ShutdownReq()),
        )
        made.broadcast = manager.inflight.part(Adapters).broadcast = broadcast
        manager.inflight.in_background(
            self._shutdown_signal.listen(lambda: self._shut_down(manager, broadcast))
        )
        manager.set_engine_state_changed_callback(broadcast.post)
        manager.inflight.on_change = broadcast.post
        app: FastAPI = sys.modules[HTTP_SERVER].app
        _mount_flush(app, manager)
        mount_reloads(app, manager)
        mount_aborts(app, broadcast)
        calls = socket.socket(socket.AF_UNIX)
        calls.bind(str(self.owner_endpoint.calls))
        calls.listen(128)
        config = uvicorn.Config(AnswersWhenAcked(app, broadcast), lifespan="off", log_config=None)
        # no access log here: the called worker logs each call
        logging.getLogger("uvicorn.access").addFilter(lambda _: False)
        async with await asyncio.start_unix_server(
            broadcast.serve_worker, self.owner_endpoint.state, limit=LONGEST_LINE
        ):
            self._serves.set_result(None)
            await uvicorn.Server(config).serve(sockets=[calls])

    def _state(self, manager: PatchedTokenizerManager) -> ServerState:
        return ServerState(
            weight_version=manager.config_value("weight_version"),
            model_path=manager.model_path,
            load_format=manager.config_value("load_format"),
            initial_weights_loaded=manager.initial_weights_loaded,
            paused=manager.is_pause,
            labels=manager.inflight.versions.labels,
            adapter_versions=manager.inflight.part(Adapters).versions,
            rejects=manager.inflight.pauses.rejects,
            hollow=manager.inflight.is_hollow,
            behind=manager.inflight.why_behind,
            forgotten=self._preprocessed.forgotten,
            adapters=_rows(manager.lora_registry.get_all_adapters()),
            reloadable=_rows(manager.lora_ref_cache),
        )

    def _shut_down(self, manager: PatchedTokenizerManager, broadcast: StateBroadcast) -> None:
        """Shut down: release all pauses, take none, and end the ranks after the last request."""
        if manager.gracefully_exit:
            return
        manager.gracefully_exit = True
        release_all(manager)
        broadcast.end_when_drained()


def _rows(adapters: Mapping[str, LoRARef]) -> tuple[Adapter, ...]:
    return tuple(msgspec.convert(ref, Adapter, from_attributes=True) for ref in adapters.values())


class AnswersWhenAcked:
    """ASGI middleware that holds an answer back until every worker has acked the state."""

    def __init__(self, app: FastAPI, broadcast: StateBroadcast) -> None:
        self._app = app
        self._broadcast = broadcast

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_acked(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._broadcast.wait_acked()
            await send(message)

        await self._app(scope, receive, send_when_acked)


def _mount_flush(app: FastAPI, manager: PatchedTokenizerManager) -> None:
    """Replace SGLang's route, because it asks its process' own manager and there is none here."""

    async def flush_cache(timeout: float = Query(0.0, ge=0.0)) -> Response:
        flushed = await manager.flush_cache(timeout)
        content = "Cache flushed.\n" if flushed.success else flushed.message
        return Response(
            content or "Flush cache failed.\n",
            status_code=HTTPStatus.OK if flushed.success else HTTPStatus.BAD_REQUEST,
        )

    path, methods = FLUSH
    app.router.add_api_route(path, flush_cache, methods=methods)
    app.router.routes.insert(0, app.router.routes.pop())
