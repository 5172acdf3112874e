"""Adapters that are loaded, replaced under their name, and unloaded, while requests use them.

SGLang refuses a name that is loaded, and unloads an adapter only when no request uses it. Here
a name passes to another adapter: requests that come from then on use that one. Those that there
are end with the one they began with, or go on with the new one from a step boundary on, as the
caller says. The old adapter is unloaded when its last request has ended, and nobody waits for
that. Each adapter has prefixes of its own in the cache, by its id.

Requests look their adapter's id up by its name and are counted for the id until they end. So
the front end's counts say who uses an adapter, wherever a request may wait. Where workers take
requests, they count them (``workers/uses.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from sglang_inflight.errors import (
    Conflict,
    InflightError,
    NotFound,
    NotOffered,
    RankFailed,
    Refused,
)
from sglang_inflight.frontend.lora.answers import AdapterLoaded
from sglang_inflight.frontend.lora.bodies import LoadAdapterBody, UnloadAdapterBody
from sglang_inflight.frontend.lora.loading import new_name, unload_unused
from sglang_inflight.frontend.lora.moving import count_as_moved
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.tasks import carry_through
from sglang_inflight.messages import (
    AdapterKVPolicy,
    LoadAdapterFromTensors,
    MoveRequestsCall,
    NameAdaptersCall,
)
from sglang_inflight.sglang_types.runtime_context import get_lora, get_memory, get_parallel
from sglang_inflight.unsupported import why_no_retraction

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.lora_registry import AdapterAnswer
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager
    from sglang_inflight.frontend.workers.state_broadcast import StateBroadcast

logger = logging.getLogger(__name__)

# A step may take long, and a move waits for its end.
CALL_TIMEOUT_S = 120.0
# How often requests are looked for that were on their way to the schedulers at a move.
LOOK_S = 0.2


class _Move(NamedTuple):
    """Where requests go on, and what becomes of their KV."""

    to_id: str
    kv_cache: AdapterKVPolicy


class Adapters:
    """Lives on the front end's event loop, where SGLang's registry of adapters lives, too."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        in_background: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._tasks = tokenizer_manager.asyncio_tasks
        self._ranks = ranks
        self._in_background = in_background
        # to the processes whose requests use adapters, where this one takes none
        self.broadcast: StateBroadcast | None = None
        # of all adapters
        self._loads = itertools.count(1)
        # by name: what was loaded last from a folder, and its version
        self._versions: dict[str, tuple[str | None, str]] = {}
        # ids of those that have no name any more, and wait for the end of their last request
        self._retiring: set[str] = set()
        # of loads, whoever asks. Two of one name would each take the other for the old one, and
        # for one that a request asks for SGLang may unload what has yet to take a name.
        self.loading = asyncio.Lock()

    def version_of(self, name: str, path: str | None) -> str:
        """Of a load whose caller names none: how many loads there were.

        SGLang loads an adapter again that it had unloaded to make room: that is the version it
        was, from the folder it was.
        """
        last_path, version = self._versions.get(name, (None, ""))
        if path is not None and path == last_path:
            is_again = name not in self._tokenizer_manager.lora_registry.get_all_adapters()
            if is_again and name in self._tokenizer_manager.lora_ref_cache:
                return version
        return str(next(self._loads))

    async def load(self, body: LoadAdapterBody) -> AdapterLoaded:
        """Raises ``RankFailed`` with SGLang's reason, ``Conflict`` where there is no room.

        What was loaded stays then. A load that was begun is carried through, whoever leaves.
        """
        _require_one_replica()
        return await carry_through(self._tasks, self._load(body))

    async def unload(self, body: UnloadAdapterBody, *, forget: bool = False) -> AdapterAnswer:
        """Raises ``NotFound``, ``RankFailed``, or ``Conflict`` where paused requests use it.

        With ``forget`` no request loads it again, as SGLang lets them.
        """
        _require_one_replica()
        if body.non_blocking:
            await carry_through(self._tasks, self._take_name(body.lora_name))
        else:
            await carry_through(self._tasks, self._unload(body.lora_name))
        if forget:
            self._tokenizer_manager.lora_ref_cache.pop(body.lora_name, None)
        return LoRAUpdateOutput(success=True, error_message="", loaded_adapters=self.loaded())

    def loaded(self) -> dict[str, str | None]:
        """Folders, by name."""
        adapters = self._tokenizer_manager.lora_registry.get_all_adapters()
        return {name: ref.lora_path for name, ref in adapters.items()}

    def knows(self, name: str) -> bool:
        """Whether it is loaded, or waits to be unloaded."""
        return name in self.loaded() or name in self._tokenizer_manager.pending_lora_unloads

    # ---- loading -------------------------------------------------------------------

    async def _load(self, body: LoadAdapterBody) -> AdapterLoaded:
        name = body.lora_name
        version = body.adapter_version or str(next(self._loads))
        async with self.loading:
            old = self._tokenizer_manager.lora_registry.get_all_adapters().get(name)
            moved = retracted = 0
            if old is None or not body.replace:
                await self._send(body, name, version)
            else:
                self._require_room(name)
                self._require_movable(body)
                # ranks do not take a name twice
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
                await self._hand_over(name, own_name, new_id, move)
            self._versions[name] = (body.path, version)
        return AdapterLoaded(
            success=True,
            error_message="",
            loaded_adapters=self.loaded(),
            lora_name=name,
            adapter_version=version,
            moved=moved,
            retracted=retracted,
        )

    async def _send(self, body: LoadAdapterBody, name: str, version: str) -> str:
        """Returns the adapter's id."""
        tokenizer_manager = self._tokenizer_manager
        request = body.request(name, version)
        load = (
            tokenizer_manager.load_lora_adapter_from_tensors
            if isinstance(request, LoadAdapterFromTensors)
            else tokenizer_manager.load_lora_adapter
        )
        result = await load(request)
        if not result.success:
            raise RankFailed(f"the adapter was not loaded: {result.error_message}")
        assert request.lora_id is not None
        return request.lora_id

    async def _hand_over(self, name: str, own_name: str, new_id: str, move: _Move | None) -> None:
        """``name`` passes to the adapter that is loaded as ``own_name``.

        A request has looked its name up before this, or looks it up after it. No adapter is
        being unloaded meanwhile; ``name`` itself may have been, since it was last looked at.
        """
        tokenizer_manager = self._tokenizer_manager
        registry = tokenizer_manager.lora_registry
        async with tokenizer_manager.lora_update_lock:
            if own_name not in registry.get_all_adapters():
                tokenizer_manager.lora_ref_cache.pop(own_name, None)
                raise Conflict(f"what was to take the name {name!r} was unloaded, as {own_name!r}")
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
        result = await self._tokenizer_manager.unload_lora_adapter(
            UnloadLoRAAdapterReqInput(lora_name=name)
        )
        if not result.success:
            raise RankFailed(f"the adapter was not unloaded: {result.error_message}")

    async def _take_name(self, name: str) -> None:
        """No request finds the adapter any more, and it goes with its last one."""
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
            # else a request would load it again
            tokenizer_manager.lora_ref_cache.pop(name, None)
        self._retire(lora_id)

    def _id_of(self, name: str) -> str | None:
        """SGLang gives no adapter a name under which another one waits to be unloaded."""
        ref = self._tokenizer_manager.lora_registry.get_all_adapters().get(name)
        if ref is not None:
            return ref.lora_id
        return self._tokenizer_manager.pending_lora_unloads.get(name)

    async def take_back(self, name: str, lora_id: str) -> None:
        """A load has failed: what there is of it goes, and nobody waits for that."""
        tokenizer_manager = self._tokenizer_manager
        if tokenizer_manager.pending_lora_unloads.get(name) == lora_id:
            del tokenizer_manager.pending_lora_unloads[name]
        if self._id_of(name) == lora_id:
            # loaded, but there was no room for it
            await tokenizer_manager.lora_registry.unregister(name)
            tokenizer_manager.lora_ref_cache.pop(name, None)
            self._retire(lora_id)
        else:
            await unload_unused(tokenizer_manager, lora_id)

    def _retire(self, lora_id: str, move: _Move | None = None) -> None:
        self._retiring.add(lora_id)
        self._in_background(self._unload_when_unused(lora_id, move))

    async def _unload_when_unused(self, old_id: str, move: _Move | None) -> None:
        """Without SGLang's lock of adapters, which would keep the next one waiting.

        With ``move``, requests go on elsewhere that were on their way to the schedulers then.
        """
        registry = self._tokenizer_manager.lora_registry
        try:
            if self.broadcast is not None:
                await self.broadcast.wait_acked()
            counter = registry._counters.get(old_id)
            while counter is not None and counter.value():
                try:
                    await asyncio.wait_for(counter.wait_for_zero(), LOOK_S if move else None)
                except TimeoutError:
                    move = await self._move_late_ones(old_id, move)
            result = await unload_unused(self._tokenizer_manager, old_id)
            if not result.success:
                raise RankFailed(f"an adapter was not unloaded: {result.error_message}")
        finally:
            self._retiring.discard(old_id)

    # ---- moving --------------------------------------------------------------------

    async def _move(self, old_id: str, move: _Move) -> tuple[int, int]:
        """Requests in the schedulers' hands go on elsewhere. Returns how many, and how many went
        back to the queue.

        The adapter is counted as used from before the call until each of them is counted for
        it, so nobody unloads it in between. Where a rank is silent it stays so: requests may
        use it of which nobody here knows.
        """
        counters = self._tokenizer_manager.lora_registry._counters
        new, old = counters.get(move.to_id), counters.get(old_id)
        if new is None:
            raise NotFound("the adapter that requests are to go on with is unloaded")
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
            self.broadcast.tell_of_move(sorted(rids), old_id, move.to_id)
            await self.broadcast.wait_acked()
        await new.decrement()
        return len(rids), sum(retracted.values())

    async def _move_late_ones(self, old_id: str, move: _Move | None) -> _Move | None:
        """Returns None where there is no more to be done: they end with the old one."""
        if move is None:
            return None
        try:
            await self._move(old_id, move)
        except InflightError as error:
            logger.warning("Requests end with the adapter that they began with: %s", error)
            return None
        return move

    # ---- what is refused -----------------------------------------------------------

    def _require_room(self, name: str) -> None:
        most = get_lora().max_loaded_loras
        held = len(self.loaded()) + len(self._retiring)
        if most is not None and held >= most:
            raise Conflict(
                f"there is no room for another adapter to take the name {name!r}: "
                f"--max-loaded-loras is {most}, and {held} are loaded, {len(self._retiring)} of "
                "them until their last requests have ended. Unload one first, or wait"
            )

    def _require_movable(self, body: LoadAdapterBody) -> None:
        if body.running != "move":
            return
        if get_parallel().pp_size > 1:
            raise Refused('running="move" needs --pp-size 1: nobody has tried both')
        if (reason := why_no_retraction()) is not None:
            raise Refused(f'running="move" is not possible here: {reason}')
        if get_memory().enable_hierarchical_cache:
            raise Refused('running="move" is not possible with --enable-hierarchical-cache')


def _require_one_replica() -> None:
    if get_parallel().dp_size > 1:
        raise NotOffered("SGLang loads and unloads no adapters while it runs with --dp-size > 1")
