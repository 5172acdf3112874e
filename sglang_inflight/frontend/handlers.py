"""The function that carries out each call, the same for HTTP, gRPC and Python."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.vocabulary.answers import Grant, NamelessGrant, Status
from sglang_inflight.vocabulary.bodies import Body, PauseBody
from sglang_inflight.vocabulary.errors import NotOffered

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# takes the body of the call's row in ``vocabulary/calls.py``
Handler = Callable[[Any], Coroutine[Any, Any, Any]]


@dataclass
class Arrival:
    """Arrival of a call's body. Failures after the arrival are handled by the call itself."""

    is_whole: bool = False


@dataclass(frozen=True)
class Handlers:
    by_name: Mapping[str, Handler]
    # wraps a call with weights, from the first byte of its body on
    piece: Callable[[], AbstractContextManager[Arrival]]
    # whether a flush of the prefix cache is left to the next commit
    skips_flush: Callable[[], bool] = lambda: False

    def with_more(self, by_name: Mapping[str, Handler]) -> Handlers:
        """Return these handlers and those of an extension's calls."""
        return replace(self, by_name={**self.by_name, **by_name})

    def __getitem__(self, name: str) -> Handler:
        """Return the handler. Raises ``NotOffered`` for a call whose extension is not there."""
        if name not in self.by_name:
            raise NotOffered(f"{name}: the extension that carries it out is off or not installed")
        return self.by_name[name]


def direct_handlers(
    tokenizer_manager: TokenizerManager,
    pauses: Pauses,
    updates: Updates,
    groups: Groups,
    ask_status: Callable[[], Awaitable[Status]],
) -> Handlers:
    """Return handlers that carry calls out at once. ``Transparent`` replaces some of them."""

    async def pause(body: PauseBody) -> Grant | NamelessGrant:
        sglangs = pauses.sglangs
        if sglangs.is_the_servers and sglangs.is_meant_by(body):
            return await sglangs.take()
        return await pauses.pause(body)

    async def is_paused(_: Body) -> bool:
        return await pauses.is_paused()

    async def status(_: Body) -> Status:
        return await ask_status()

    async def weight_version(_: Body) -> dict[str, Any]:
        return {"weight_version": tokenizer_manager.config_value("weight_version")}

    async def flush_cache(_: Body) -> Any:
        return await tokenizer_manager.flush_cache()

    by_name: dict[str, Handler] = {
        "pause_generation": pause,
        "continue_generation": pauses.resume,
        "update_weights_from_disk": updates.update,
        "update_weights_from_tensor": updates.update,
        "update_weights_from_distributed": updates.update,
        "update_weights_from_ipc": updates.update,
        "begin_weight_update": updates.begin,
        "seal_weight_update": updates.seal,
        "end_weight_update": updates.end,
        "abort_weight_update": updates.abort,
        "init_weights_update_group": groups.join,
        "destroy_weights_update_group": groups.leave,
        "update_weight_version": updates.rename,
        "rollback_weights": updates.roll_back,
        "get_weight_version": weight_version,
        "is_paused": is_paused,
        "inflight_status": status,
        "flush_cache": flush_cache,
    }
    return Handlers(by_name, partial(lose_session_of_partial_piece, updates))


@contextmanager
def lose_session_of_partial_piece(updates: Updates) -> Iterator[Arrival]:
    """Drop the session if the body is incomplete and the session takes pieces without an id.

    The client may end the session without reading the answers to its pieces.
    """
    arrival, session = Arrival(), updates.unnamed_session
    try:
        yield arrival
    except BaseException:
        if session is not None and not arrival.is_whole:
            updates.lose(session, "a piece of the session was unreadable or incomplete")
        raise
