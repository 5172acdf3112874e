"""One of several tokenizer workers, following the owner's state.

This module hooks ``TokenizerManager``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sglang.srt.managers.io_struct import ShutdownReq

from sglang_inflight.extensions.aborts.aborts import Aborts
from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.adapters.moved_requests import count_as_moved
from sglang_inflight.extensions.fleet.fleet_version import FleetVersion
from sglang_inflight.extensions.workers.folder import OwnerEndpoint
from sglang_inflight.extensions.workers.forward import Forward, abort, reload
from sglang_inflight.extensions.workers.protocol import (
    LONGEST_LINE,
    Abort,
    Aborted,
    Ack,
    AdapterRefs,
    Idle,
    Moved,
    ServerState,
    Uses,
    WorkerMessage,
    line,
    read_owner_message,
)
from sglang_inflight.extensions.workers.refcounts import WorkersRegistry, as_sglangs
from sglang_inflight.frontend.aio import keep
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.sglangs_pause import admit_requests
from sglang_inflight.frontend.updates.version_record import clear_preprocessed
from sglang_inflight.hooking import AROUND, TOKENIZER_MANAGER, hook, with_us

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import LoadAdapterRequest, TokenizerManager

logger = logging.getLogger(__name__)

# the worker of each front end that is one
WORKERS: WeakKeyDictionary[Frontend, Worker] = WeakKeyDictionary()


def _is_one(tokenizer_manager: PatchedTokenizerManager) -> bool:
    return with_us(tokenizer_manager) and tokenizer_manager.inflight in WORKERS


def _of(tokenizer_manager: PatchedTokenizerManager) -> Worker:
    return WORKERS[tokenizer_manager.inflight]


class Worker:
    """Applies the owner's state to SGLang's objects in this process.

    Created before the worker's first request, with the current state: a worker restarted after a
    crash has only the arguments of the server's start. Lives on the worker's event loop.
    """

    def __init__(
        self,
        owner_endpoint: OwnerEndpoint,
        forward: Forward,
        frontend: Frontend,
        tokenizer_manager: TokenizerManager,
    ) -> None:
        self._frontend = frontend
        self._tokenizer_manager = tokenizer_manager
        self._writer: asyncio.StreamWriter | None = None
        self._calls = owner_endpoint.calls
        self._forward = forward
        self._adapters = WorkersRegistry(self._uses_have_changed)
        tokenizer_manager.lora_registry = self._adapters
        self._sent_uses: Uses = {}
        self._will_send_uses = False
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(owner_endpoint.state))
        # unbuffered: read the first line only, because the event loop reads the rest
        with connection.makefile("rb", buffering=0) as file:
            first = read_owner_message(file.readline())
        assert isinstance(first, ServerState)
        self._state = first
        self._act(first)
        connection.setblocking(False)
        keep(tokenizer_manager.asyncio_tasks, self._listen(connection))
        WORKERS[frontend] = self
        # SGLang does so only at the first request. A worker without requests would then be ended
        # by its HTTP server, which waits for the forwarded calls.
        tokenizer_manager.auto_create_handle_loop()

    @hook(f"{TOKENIZER_MANAGER}._dispatch_to_scheduler", AROUND, via=_of, when=_is_one)
    def dispatch(self, dispatch: Callable[[object], None], obj: object) -> None:
        """Report the worker idle in place of the ``ShutdownReq``, SGLang's last message.

        A worker may have no request while others have, so the owner ends the schedulers for all.
        """
        if isinstance(obj, ShutdownReq):
            self._send(Idle())
        else:
            dispatch(obj)

    @hook(f"{TOKENIZER_MANAGER}.sigterm_watchdog", AROUND, via=_of, when=_is_one)
    async def exit_after_forwarded_calls(self, watch: Callable[[], Awaitable[None]]) -> None:
        """Wait for the owner's answers to forwarded calls before ``watch`` exits the process.

        Ending the schedulers fails these calls.
        """
        try:
            await watch()
        except SystemExit:
            await self._forward.until_answered()
            raise

    async def reload(self, request: LoadAdapterRequest) -> LoRAUpdateOutput:
        """Reload an evicted adapter for a request."""
        return await reload(self._calls, request)

    async def abort(self, names: list[str]) -> int:
        """Abort the requests of these names on all workers. Return the number of requests."""
        return await abort(self._calls, names)

    async def _listen(self, connection: socket.socket) -> None:
        """Follow the owner. If that fails, exit at once: the worker would serve stale state.

        The HTTP server then treats the worker as dead. A worker that received SIGTERM ends by
        itself, after its answers.
        """
        try:
            await self._receive(connection)
            logger.error("The process that owns the server's state has ended.")
        except Exception:
            logger.exception("This tokenizer worker cannot follow the owner of the server's state.")
        if not self._tokenizer_manager.gracefully_exit:
            os._exit(1)

    async def _receive(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(
            sock=connection, limit=LONGEST_LINE
        )
        self._send_uses()
        self._send(Ack(self._state.number))
        while message := await reader.readline():
            match read_owner_message(message):
                case ServerState() as state:
                    self._act(state)
                    await self._adapters.flush_lookups()
                    self._send_uses()
                    self._send(Ack(state.number))
                case Abort(number=number, names=names):
                    self._send(Aborted(number, self._frontend.part(Aborts).here(names)))
                case Moved(rids=rids, from_id=from_id, to_id=to_id):
                    await count_as_moved(self._tokenizer_manager, rids, from_id, to_id)
                    self._send_uses()

    def _act(self, state: ServerState) -> None:
        tokenizer_manager, before = self._tokenizer_manager, self._state
        self._state = state
        tokenizer_manager._update_weight_version_if_provided(state.weight_version)
        tokenizer_manager.model_path = state.model_path
        if state.load_format != tokenizer_manager.config_value("load_format"):
            tokenizer_manager.record_config_updates(
                "tokenizer.update_weights", load_format=state.load_format
            )
        if state.forgotten != before.forgotten:
            clear_preprocessed(tokenizer_manager)
        tokenizer_manager.initial_weights_loaded = state.initial_weights_loaded
        tokenizer_manager.is_pause = state.paused
        if before.paused and not state.paused:
            keep(tokenizer_manager.asyncio_tasks, admit_requests(tokenizer_manager))
        self._frontend.is_hollow = state.hollow
        self._frontend.part(FleetVersion).why_behind = state.behind
        self._frontend.pauses.owner_rejects = state.rejects
        self._adapters.replace_all(state.adapters)
        refs = map(as_sglangs, state.reloadable)
        tokenizer_manager.lora_ref_cache = {ref.lora_name: ref for ref in refs}
        # last, because these let waiting requests through
        self._frontend.versions.replace(state.labels)
        self._frontend.part(Adapters).follow(state.adapter_versions)

    def _uses_have_changed(self) -> None:
        """Send the counts once for all changes in one turn of the event loop."""
        if not self._will_send_uses:
            self._will_send_uses = True
            asyncio.get_running_loop().call_soon(self._send_uses)

    def _send_uses(self) -> None:
        self._will_send_uses = False
        uses = self._adapters.uses()
        if uses != self._sent_uses and self._writer is not None:
            self._sent_uses = uses
            self._send(AdapterRefs(uses))

    def _send(self, message: WorkerMessage) -> None:
        if self._writer is not None:
            self._writer.write(line(message))
