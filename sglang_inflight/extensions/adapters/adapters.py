"""Load, replace under the same name, and unload adapters while requests use them.

SGLang refuses a loaded name, and unloads an adapter only when no request uses it. Here a name
passes to another adapter, and later requests use the new adapter. The caller chooses for running
requests: they finish with the old adapter, or move to the new one at a step boundary. The old
adapter is unloaded in the background after its last request. Each adapter has prefixes of its own
in the cache, by its id.

Requests look their adapter's id up by name, and are counted for the id until they end. So the
front end's counts include every request, queued or running. With several tokenizer workers, the
workers count.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from sglang_inflight.capabilities import ONE_REPLICA
from sglang_inflight.extensions.adapters.messages import (
    CheckAdapterCall,
    LoadAdapter,
    LoadAdapterFromTensors,
    MoveRequestsCall,
    NameAdaptersCall,
)
from sglang_inflight.extensions.adapters.moved_requests import count_as_moved
from sglang_inflight.frontend.aio import carry_through
from sglang_inflight.frontend.frontend import FRONT_PARTS, HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.messages import AdapterKVPolicy
from sglang_inflight.sglang_types import get_lora, get_parallel
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.bodies import (
    LoadAdapterBody,
    LoadFolderBody,
    LoadTensorsBody,
    UnloadAdapterBody,
)
from sglang_inflight.vocabulary.errors import (
    Conflict,
    InflightError,
    NotFound,
    NotOffered,
    RankFailed,
    Refused,
)
from sglang_inflight.vocabulary.labels import FIRST_ADAPTER_VERSION, AdapterLabel

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BaseReq, LoRAUpdateOutput

    from sglang_inflight.sglang_types import LoadAdapterRequest, TokenizerManager

logger = logging.getLogger(__name__)

# A step may take long, and a move waits for its end.
CALL_TIMEOUT_S = 120.0
# A check reads every element of an adapter.
CHECK_TIMEOUT_S = 600.0
# How often to move requests that reached the schedulers only after a move.
POLL_S = 0.2


class _Loaded(NamedTuple):
    """The last load of a name."""

    # None for tensors
    path: str | None
    version: str
    # digest of what the ranks read, see ``weights.digest_of``; None for tensors
    digest: str | None = None


class _Move(NamedTuple):
    """Target of a move of requests, and the policy for their KV."""

    to_id: str
    kv_cache: AdapterKVPolicy


class WorkersOfOwner(Protocol):
    """The owner's way to its workers, whose requests use the adapters."""

    def post_move(self, rids: list[str], from_id: str, to_id: str) -> None:
        """Tell the workers that requests have moved to another adapter."""

    async def wait_acked(self) -> None:
        """Wait until every worker has applied the owner's state."""


class Adapters:
    """Adapters of one server. Lives on the front end's event loop, as SGLang's registry does."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        can: Capabilities,
        in_background: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        self._can = can
        self._tokenizer_manager = tokenizer_manager
        self._tasks = tokenizer_manager.asyncio_tasks
        self._ranks = ranks
        self._in_background = in_background
        # set in the owner: sends to the tokenizer workers, whose requests use the adapters
        self.broadcast: WorkersOfOwner | None = None
        # set in a worker: reloads an evicted adapter for a request
        self.reload: Callable[[LoadAdapterRequest], Awaitable[LoRAUpdateOutput]] | None = None
        # counts loads of all adapters
        self._loads = itertools.count(1)
        # last loads by the adapter's name
        self._versions: dict[str, _Loaded] = {}
        # digests by adapter's id, from the check of a load until its name is noted
        self._digests: dict[str, str | None] = {}
        # a hook of the registry's asks for it
        vars(tokenizer_manager.lora_registry)["inflight"] = self
        # called after a version has changed, on the event loop
        self.on_change: Callable[[], None] = lambda: None
        # ids of adapters without a name, waiting for their last request
        self._retiring: set[str] = set()
        # Serializes all loads. Two loads of one name would each treat the other as the old
        # adapter. And a load on a request's behalf may make SGLang unload an adapter that has yet
        # to take its name.
        self.loading = asyncio.Lock()

    def version_of(self, name: str, path: str | None) -> tuple[str, str | None]:
        """Return the version of a load without one: a count of loads.

        If SGLang evicted an adapter and reloads it from the same path, its version stays. Then
        also return the digest that the load must have.
        """
        last = self._versions.get(name)
        if last is not None and path is not None and path == last.path:
            is_again = name not in self._tokenizer_manager.lora_registry.get_all_adapters()
            if is_again and name in self._tokenizer_manager.lora_ref_cache:
                return last.version, last.digest
        return str(next(self._loads)), None

    def label_of(self, name: str) -> AdapterLabel | None:
        """Return the version that new requests of the adapter ``name`` get; None if not loaded."""
        tokenizer_manager = self._tokenizer_manager
        if (
            name not in tokenizer_manager.lora_registry.get_all_adapters()
            and name not in tokenizer_manager.lora_ref_cache
        ):
            return None
        last = self._versions.get(name)
        return AdapterLabel(name, last.version if last is not None else FIRST_ADAPTER_VERSION)

    def note(self, name: str, path: str | None, version: str, lora_id: str) -> None:
        """Note the version of a load that has taken the name."""
        self._versions[name] = _Loaded(path, version, self._digests.pop(lora_id, None))
        self.on_change()

    async def check_load(self, request: BaseReq, results: list[Any]) -> list[Any]:
        """Have every rank check the adapter that it has just loaded; return the load's results.

        ``ControlCalls.after``: SGLang registers the adapter afterwards, so no request uses it
        yet. Results of other calls are returned as they are.
        """
        if not isinstance(request, LoadAdapter | LoadAdapterFromTensors):
            return results
        if not all(result.success for result in results):
            return results
        assert request.lora_id is not None
        is_folder = isinstance(request, LoadAdapter)
        call = CheckAdapterCall(lora_id=request.lora_id, asks_digest=is_folder)
        try:
            answers = await self._ranks.call(call, CHECK_TIMEOUT_S)
            digests = {answer.digest for answer in answers}
            if len(digests) > 1:
                raise Conflict("the ranks have read different files: load it again")
            if isinstance(request, LoadAdapter) and request.digest not in (None, *digests):
                raise Conflict(
                    f"the files in {request.lora_path!r} are not those that were loaded as "
                    f"version {request.adapter_version!r} of {request.adapter!r}: load them by a "
                    "call, as a version of their own"
                )
        except Refused as error:
            failed: Any = LoRAUpdateOutput(
                success=False,
                error_message=str(error),
                loaded_adapters=results[0].loaded_adapters,
            )
            return [failed]
        self._digests[request.lora_id] = digests.pop()
        return results

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """The names and versions of the loads, for tokenizer workers."""
        return tuple((name, last.version) for name, last in self._versions.items())

    def follow(self, versions: Iterable[tuple[str, str]]) -> None:
        """Take the owner's ``versions``, in a tokenizer worker."""
        self._versions = {name: _Loaded(None, version) for name, version in versions}
        self.on_change()

    async def load(self, body: LoadAdapterBody) -> AdapterLoaded:
        """Load an adapter. A started load finishes even if its caller leaves.

        Raises ``RankFailed`` with SGLang's reason, ``Conflict`` if there is no room; the loaded
        adapters then stay.
        """
        _require_one_replica()
        return await carry_through(self._tasks, self._load(body))

    async def unload(self, body: UnloadAdapterBody, *, forget: bool = False) -> LoRAUpdateOutput:
        """Unload an adapter. With ``forget`` no request loads it again, as SGLang would allow.

        Raises ``NotFound``, ``RankFailed``, or ``Conflict`` if paused requests use the adapter.
        """
        _require_one_replica()
        if body.non_blocking:
            await carry_through(self._tasks, self._take_name(body.lora_name))
        else:
            await carry_through(self._tasks, self._unload(body.lora_name))
        if forget:
            self._tokenizer_manager.lora_ref_cache.pop(body.lora_name, None)
        loaded: Any = self.loaded()
        return LoRAUpdateOutput(success=True, error_message="", loaded_adapters=loaded)

    def loaded(self) -> dict[str, str | None]:
        """Return the loaded adapters' folders, by name."""
        adapters = self._tokenizer_manager.lora_registry.get_all_adapters()
        return {name: ref.lora_path for name, ref in adapters.items()}

    def knows(self, name: str) -> bool:
        """Whether the adapter is loaded, or waits to be unloaded."""
        return name in self.loaded() or name in self._tokenizer_manager.pending_lora_unloads

    # ---- loading -------------------------------------------------------------------

    async def _load(self, body: LoadAdapterBody) -> AdapterLoaded:
        name = body.lora_name
        version = body.adapter_version or str(next(self._loads))
        async with self.loading:
            old = self._tokenizer_manager.lora_registry.get_all_adapters().get(name)
            moved = retracted = 0
            if old is None or not body.replace:
                new_id = await self._send(body, name, version)
            else:
                self._require_room(name)
                if body.running == "move" and self._can.move_adapters is not None:
                    raise Refused(self._can.move_adapters)
                # ranks refuse a loaded name
                own_name = new_name(name)
                new_id = await self._send(body, own_name, version)
                move = _Move(new_id, body.kv_policy) if body.running == "move" else None
                if move is not None:
                    try:
                        moved, retracted = await self._move(old.lora_id, move)
                    except Refused:
                        await self._unload(own_name)
                        self._tokenizer_manager.lora_ref_cache.pop(own_name, None)
                        raise
                await self._exchange_name(name, own_name, new_id, move)
            self.note(name, body.path, version, new_id)
        loaded: Any = self.loaded()
        return AdapterLoaded(
            success=True,
            error_message="",
            loaded_adapters=loaded,
            lora_name=name,
            adapter_version=version,
            moved=moved,
            retracted=retracted,
        )

    async def _send(self, body: LoadAdapterBody, name: str, version: str) -> str:
        """Load the adapter by SGLang's call, and return its id."""
        tokenizer_manager = self._tokenizer_manager
        request = _request(body, name, version)
        result: LoRAUpdateOutput
        if isinstance(request, LoadAdapterFromTensors):
            result = await tokenizer_manager.load_lora_adapter_from_tensors(request)
        else:
            result = await tokenizer_manager.load_lora_adapter(request)
        if not result.success:
            raise RankFailed(f"the adapter was not loaded: {result.error_message}")
        assert request.lora_id is not None
        return request.lora_id

    async def _exchange_name(
        self, name: str, own_name: str, new_id: str, move: _Move | None
    ) -> None:
        """Give ``name`` to the adapter loaded as ``own_name``.

        The registry's lock makes the exchange atomic for requests. ``lora_update_lock`` keeps
        unloads out, but ``name`` may have been unloaded since the caller's lookup.
        """
        tokenizer_manager = self._tokenizer_manager
        registry = tokenizer_manager.lora_registry
        async with tokenizer_manager.lora_update_lock:
            if own_name not in registry.get_all_adapters():
                tokenizer_manager.lora_ref_cache.pop(own_name, None)
                raise Conflict(
                    f"the new adapter for the name {name!r} was unloaded meanwhile, as {own_name!r}"
                )
            old_id = self._id_of(name)
            names = {new_id: name} if old_id is None else {old_id: own_name, new_id: name}
            await self._ranks.carry_out(NameAdaptersCall(names=names), CALL_TIMEOUT_S)
            async with registry._registry_lock.writer_lock:
                registry._registry.pop(name, None)
                new = msgspec.structs.replace(registry._registry.pop(own_name), lora_name=name)
                registry._registry[name] = new
            tokenizer_manager.pending_lora_unloads.pop(name, None)
            tokenizer_manager.lora_ref_cache[name] = new
            tokenizer_manager.lora_ref_cache.pop(own_name, None)
        if old_id is not None:
            self._retire(old_id, move)

    # ---- unloading -----------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        result: LoRAUpdateOutput = await self._tokenizer_manager.unload_lora_adapter(
            UnloadLoRAAdapterReqInput(lora_name=name)
        )
        if not result.success:
            raise RankFailed(f"the adapter was not unloaded: {result.error_message}")

    async def _take_name(self, name: str) -> None:
        """Hide the adapter from new requests, and unload it after its last request."""
        tokenizer_manager = self._tokenizer_manager
        registry = tokenizer_manager.lora_registry
        async with self.loading, tokenizer_manager.lora_update_lock:
            lora_id = self._id_of(name)
            if lora_id is None:
                raise NotFound(f"the adapter {name!r} is not loaded")
            names = {lora_id: new_name(name)}
            await self._ranks.carry_out(NameAdaptersCall(names=names), CALL_TIMEOUT_S)
            async with registry._registry_lock.writer_lock:
                registry._registry.pop(name, None)
            tokenizer_manager.pending_lora_unloads.pop(name, None)
            # otherwise a request would load the adapter again
            tokenizer_manager.lora_ref_cache.pop(name, None)
        self._retire(lora_id)

    def _id_of(self, name: str) -> str | None:
        """Return the id of the adapter ``name``, also of one waiting to be unloaded.

        The id is unique: SGLang gives no new adapter the name of a waiting one.
        """
        ref = self._tokenizer_manager.lora_registry.get_all_adapters().get(name)
        if ref is not None:
            return ref.lora_id
        return self._tokenizer_manager.pending_lora_unloads.get(name)

    async def unload_failed(self, name: str, lora_id: str) -> None:
        """Unload the remains of a failed load; do not wait for their requests."""
        tokenizer_manager = self._tokenizer_manager
        self._digests.pop(lora_id, None)
        if tokenizer_manager.pending_lora_unloads.get(name) == lora_id:
            del tokenizer_manager.pending_lora_unloads[name]
        if self._id_of(name) == lora_id:
            # loaded and registered, but evicting another adapter failed
            await tokenizer_manager.lora_registry.unregister(name)
            tokenizer_manager.lora_ref_cache.pop(name, None)
            self._retire(lora_id)
        else:
            await unload_unused(tokenizer_manager, lora_id)

    def _retire(self, lora_id: str, move: _Move | None = None) -> None:
        self._retiring.add(lora_id)
        self._in_background(self._unload_when_unused(lora_id, move))

    async def _unload_when_unused(self, old_id: str, move: _Move | None) -> None:
        """Wait for the adapter's last request without ``lora_update_lock``, then unload it.

        Holding the lock would block the next load. With ``move``, also move requests that reached
        the schedulers after the move.
        """
        registry = self._tokenizer_manager.lora_registry
        try:
            if self.broadcast is not None:
                await self.broadcast.wait_acked()
            counter = registry._counters.get(old_id)
            while counter is not None and counter.value():
                try:
                    await asyncio.wait_for(counter.wait_for_zero(), POLL_S if move else None)
                except TimeoutError:
                    move = await self._move_late_ones(old_id, move)
            result = await unload_unused(self._tokenizer_manager, old_id)
            if not result.success:
                raise RankFailed(f"an adapter was not unloaded: {result.error_message}")
        finally:
            self._retiring.discard(old_id)

    # ---- moving --------------------------------------------------------------------

    async def _move(self, old_id: str, move: _Move) -> tuple[int, int]:
        """Move the schedulers' requests to another adapter; return how many, how many retracted.

        The target's count is raised during the call, so it is not unloaded before each moved
        request is counted. If a rank is silent the count stays raised: unknown requests may use
        the adapter.
        """
        counters = self._tokenizer_manager.lora_registry._counters
        new, old = counters.get(move.to_id), counters.get(old_id)
        if new is None:
            raise NotFound("the new adapter was unloaded before requests could move to it")
        if old is None:
            return 0, 0
        await new.increment()
        call = MoveRequestsCall(from_id=old_id, to_id=move.to_id, kv_cache=move.kv_cache)
        try:
            answers = await self._ranks.carry_out(call, CALL_TIMEOUT_S)
        except Refused:
            await new.decrement()
            raise
        rids = {rid for answer in answers for rid in answer.rids}
        # the ranks of a replica hold the same requests
        retracted = {answer.dp_rank: answer.retracted for answer in answers}
        await count_as_moved(self._tokenizer_manager, rids, old_id, move.to_id)
        if self.broadcast is not None and rids:
            self.broadcast.post_move(sorted(rids), old_id, move.to_id)
            await self.broadcast.wait_acked()
        await new.decrement()
        return len(rids), sum(retracted.values())

    async def _move_late_ones(self, old_id: str, move: _Move | None) -> _Move | None:
        """Move late requests; return None to stop, and let the rest finish with the old adapter."""
        if move is None:
            return None
        try:
            await self._move(old_id, move)
        except InflightError as error:
            logger.warning("Late requests were not moved, and finish on the old adapter: %s", error)
            return None
        return move

    # ---- what is refused -----------------------------------------------------------

    def _require_room(self, name: str) -> None:
        most = get_lora().max_loaded_loras
        held = len(self.loaded()) + len(self._retiring)
        if most is not None and held >= most:
            raise Conflict(
                f"there is no room for a new adapter {name!r}: --max-loaded-loras is {most}, and "
                f"{held} are loaded, {len(self._retiring)} of them until their last requests have "
                "ended. Unload one first, or wait"
            )


@FRONT_PARTS.join()
def make_adapters(frontend: Frontend, tokenizer_manager: TokenizerManager) -> Adapters:
    made = Adapters(tokenizer_manager, frontend.ranks, frontend.can, frontend.in_background)
    made.on_change = frontend.versions.notify
    frontend.adapter_label = made.label_of
    frontend.control_calls.after = made.check_load
    return made


@HANDLERS.join()
def add_handlers(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    adapters = frontend.part(Adapters)
    return handlers.with_more(
        {
            "load_lora_adapter": adapters.load,
            "load_lora_adapter_from_tensors": adapters.load,
            "unload_lora_adapter": adapters.unload,
        }
    )


def _require_one_replica() -> None:
    if get_parallel().dp_size > 1:
        raise NotOffered(ONE_REPLICA)


async def unload_unused(tm: TokenizerManager, lora_id: str) -> Any:
    """Unload a nameless adapter by its id. Ranks without the adapter answer with success."""
    name = new_name("unused")
    tm.pending_lora_unloads[name] = lora_id
    return await tm.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))


def _request(
    body: LoadAdapterBody, name: str, version: str
) -> LoadAdapter | LoadAdapterFromTensors:
    """Return SGLang's request: load as ``name``; later requests use ``body.lora_name``."""
    match body:
        case LoadFolderBody():
            return LoadAdapter(
                lora_name=name,
                lora_path=body.lora_path,
                pinned=body.pinned,
                adapter=body.lora_name,
                adapter_version=version,
            )
        case LoadTensorsBody():
            return LoadAdapterFromTensors(
                lora_name=name,
                config_dict=body.config_dict,
                serialized_named_tensors=body.serialized_named_tensors,
                pinned=body.pinned,
                added_tokens_config=body.added_tokens_config,
                load_format=body.load_format,
                expected_checksums=body.expected_checksums,
                adapter=body.lora_name,
                adapter_version=version,
            )
    raise TypeError(body)


def new_name(name: str) -> str:
    """Return a name unused by any adapter."""
    return f"{name}#{uuid.uuid4().hex}"


class AdapterLoaded(LoRAUpdateOutput, kw_only=True):
    lora_name: str
    adapter_version: str
    # requests moved to this adapter, and how many of them went back to the queue
    moved: int = 0
    retracted: int = 0
