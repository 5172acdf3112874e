"""A server's entry in a gateway's list, read from the status of its ranks.

Nothing is kept here between two answers. With several tokenizer workers each one answers by itself,
because each one says at ``/ready`` whether it is ready.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

from sglang_inflight.frontend.frontend import FRONT_PARTS, HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.http.ready import ITS_OWN, why_not_ready
from sglang_inflight.frontend.tokenizer_hooks import HTTP_SERVER
from sglang_inflight.sglang_types import get_exec, get_parallel
from sglang_inflight.vocabulary.answers import (
    Capabilities,
    EntryPause,
    EntryUpdate,
    PauseMode,
    Role,
    Status,
    WorkerAbilities,
    WorkerEntry,
    WorkerType,
)
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.version import VERSION

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

_SOURCE = "update_weights_from_"
_TYPES: dict[Role, WorkerType] = {"prefill": "prefill", "decode": "decode", "both": "regular"}


class Entries:
    """Writes the entry of one server. Lives on the front end's event loop."""

    # names of the calls that the server offers
    calls: tuple[str, ...] = ()

    def __init__(self, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
        self._frontend = frontend
        self._tokenizer_manager = tokenizer_manager
        # read now: the next Engine of this process overwrites SGLang's arguments
        parallel = get_parallel()
        self._sleeps = get_exec().features.enable_memory_saver
        self._fixed: dict[str, Any] = {
            "engine_version": version("sglang"),
            "inflight_version": VERSION,
            "tp_size": parallel.tp_size,
            "dp_size": parallel.dp_size,
            "pp_size": parallel.pp_size,
            "world_size": frontend.ranks.count,
        }

    async def worker(self, _: Body) -> WorkerEntry:
        status = await self._frontend.status()
        # nothing is awaited from here on, so that all fields are of one moment
        why = self._why_not_ready()
        staging = status.staging
        return WorkerEntry(
            **self._fixed,
            model=self._tokenizer_manager.served_model_name,
            model_id=self._tokenizer_manager.served_model_name,
            model_path=self._tokenizer_manager.model_path,
            worker_type=_TYPES[status.role],
            health="ready" if why is None else "not_ready",
            why_not_ready=why,
            weight_version=status.weight_version,
            epoch=status.epoch,
            epochs=span_of_epochs(status),
            digest=status.digest,
            previous_version=status.previous_version,
            update=EntryUpdate(
                state=staging.state,
                update_id=staging.update_id,
                can_roll_back=staging.can_roll_back,
                refusal=why_no_update(status),
            ),
            pause=EntryPause(
                state=status.state,
                paused=status.paused,
                mode=status.mode,
                new_requests=status.new_requests,
                holders=len(status.holders),
            ),
            capabilities=abilities_of(status, self.calls, sleeps=self._sleeps),
            routes=routes_of(self.calls),
        )

    def _why_not_ready(self) -> str | None:
        """Return what ``/ready`` says. SGLang never notes that an ``Engine`` has started."""
        manager = self._tokenizer_manager
        if serves_http(manager):
            return why_not_ready(self._frontend, manager)
        why = self._frontend.why_not_ready()
        return why or (ITS_OWN if manager.is_pause or manager.gracefully_exit else None)


def serves_http(tokenizer_manager: TokenizerManager) -> bool:
    """Tell a server's manager from that of an ``Engine`` in its caller's process."""
    http_server = sys.modules.get(HTTP_SERVER)
    state = http_server.get_global_state() if http_server is not None else None
    return state is not None and state.tokenizer_manager is tokenizer_manager


@FRONT_PARTS.join()
def make_entries(frontend: Frontend, tokenizer_manager: TokenizerManager) -> Entries:
    return Entries(frontend, tokenizer_manager)


@HANDLERS.join(order=100)
def add_handler(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    """Add the call after those of the other extensions, because the entry lists them all."""
    entries = frontend.part(Entries)
    handlers = handlers.with_more({"inflight_worker": entries.worker})
    entries.calls = tuple(handlers.by_name)
    return handlers


def span_of_epochs(status: Status) -> tuple[int, int]:
    """Return the lowest epoch of the ranks and the highest, which differ during a commit."""
    epochs = [rank.epoch for rank in status.ranks]
    return min(epochs), max(epochs)


def why_no_update(status: Status) -> str | None:
    """Return the first rank's reason to take no updates, or None: the stages differ in models."""
    return next((rank.staging.refusal for rank in status.ranks if rank.staging.refusal), None)


def abilities_of(status: Status, calls: Sequence[str], *, sleeps: bool) -> WorkerAbilities:
    """Return what the server can do with its ``calls``."""
    can = status.capabilities
    takes_updates = why_no_update(status) is None
    sources = [name.removeprefix(_SOURCE) for name in calls if name.startswith(_SOURCE)]
    return WorkerAbilities(
        pause_modes=pause_modes(can),
        update_from=tuple(sources) if takes_updates else (),
        sleep_wake=sleeps,
        sessions=takes_updates,
        two_phase=takes_updates and all(rank.staging.mode != "off" for rank in status.ranks),
        transparent="transparent" in status.extensions,
        kv_max_age=can.kv_max_age is None,
        pin=can.pin is None,
    )


def pause_modes(can: Capabilities) -> tuple[PauseMode, ...]:
    if can.pause is not None:
        # the one mode of SGLang's own pause
        return ("abort",)
    modes: tuple[PauseMode, ...] = get_args(PauseMode)
    return tuple(mode for mode in modes if mode != "retract" or can.retract is None)


def routes_of(calls: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the calls, without their first slash."""
    paths = (TABLE[name].path or f"/{name}" for name in calls if name in TABLE)
    return tuple(sorted(path.removeprefix("/") for path in paths))
