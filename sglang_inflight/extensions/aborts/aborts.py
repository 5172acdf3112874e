"""Resolve an abort's name to requests by exact match, never by prefix.

A request's name is its ``rid``. SGLang splits a batch, or ``n`` samples of a prompt, into several
requests with new names. The client's ``rid`` of such a call is the name of their group: without
groups an abort by the client's ``rid`` would find none of these requests.

The front end resolves a name here, and sends the schedulers aborts by their own ``rid`` (patch
0008). An abort by a request's own ``rid`` cannot end a later request of the same name: the abort
goes to the schedulers on the same socket, before that request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from sglang_inflight.frontend.frontend import FRONT_PARTS, Frontend

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


class Group(TypedDict):
    """Requests of one call. A plain dict, because SGLang pickles requests into its dumps."""

    name: str
    # holds also for requests not yet made by SGLang
    is_aborted: bool


# attribute of a ``GenerateReqInput``: a group for each prompt, or one for all
GROUPS = "inflight_groups"
# attribute of a single request's ``GenerateReqInput``, and of its copies: the request's group
GROUP = "inflight_group"
# attribute of a ``ReqState``: abort as soon as the schedulers have the request
_IS_ABORTED = "inflight_is_aborted"


class Aborts:
    """Resolve names to requests of one ``TokenizerManager``, on its event loop."""

    def __init__(
        self, tokenizer_manager: TokenizerManager, end_waits: Callable[[str], int]
    ) -> None:
        """``end_waits`` ends the waits for a version of the requests of a name, and counts them."""
        self._tokenizer_manager = tokenizer_manager
        self._end_waits = end_waits
        # ends the requests of names on all tokenizer workers, and counts them; None for one worker
        self.on_all_workers: Callable[[list[str]], Awaitable[int]] | None = None

    def named(self, name: str) -> list[str]:
        """Return the ``rid`` of the live request ``name``, else of each request in group ``name``.

        SGLang itself aborts by a single request's ``rid``, after a disconnect for example. So a
        group of the same name is another client's, and runs on.
        """
        states = self._tokenizer_manager.rid_to_state
        if name in states:
            return [name]
        return [rid for rid, state in states.items() if _group_name(state) == name]

    async def everywhere(self, names: Iterable[str]) -> int:
        """End the requests of these names on all workers. Return their number."""
        names = list(names)
        if self.on_all_workers is None:
            return self.here(names)
        return await self.on_all_workers(names)

    def here(self, names: Iterable[str]) -> int:
        """End this process's requests of these names. Return their number."""
        found = {name: self.named(name) for name in names}
        waits = sum(map(self._end_waits, found))
        for name in found:
            self._tokenizer_manager.abort_request(name)
        return waits + len({rid for rids in found.values() for rid in rids})

    def end(self, name: str) -> list[str]:
        """Return each ``rid`` for the schedulers to end.

        A request still being tokenized is ended when the schedulers have it: an abort sent before
        its request would find nothing.
        """
        self._end_waits(name)
        rids = []
        for rid in self.named(name):
            state = self._tokenizer_manager.rid_to_state[rid]
            if rid != name:
                _group_of(state)["is_aborted"] = True
            if state.dispatched:
                rids.append(rid)
            else:
                setattr(state, _IS_ABORTED, True)
        return rids

    def is_due(self, rid: str) -> bool:
        """Whether the request was aborted before the schedulers had it."""
        state = self._tokenizer_manager.rid_to_state.get(rid)
        if state is None:
            return False
        group = _group_of(state)
        return getattr(state, _IS_ABORTED, False) or (group is not None and group["is_aborted"])


@FRONT_PARTS.join()
def make_aborts(frontend: Frontend, tokenizer_manager: TokenizerManager) -> Aborts:
    return Aborts(tokenizer_manager, lambda name: frontend.end_waits(name))


def _group_of(state: Any) -> Any:
    return getattr(state.obj, GROUP, None)


def _group_name(state: Any) -> str | None:
    group = _group_of(state)
    return None if group is None else group["name"]
