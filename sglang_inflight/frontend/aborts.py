"""Resolve an abort's name to requests by exact match, never by prefix.

A request's name is its ``rid``. SGLang splits a batch, or ``n`` samples of a prompt, into several
requests with new names. The client's ``rid`` of such a call is the name of their group: without
groups an abort by the client's ``rid`` would find none of these requests.

The front end resolves a name here, and sends the schedulers aborts by their own ``rid`` (patch
0008). An abort by a request's own ``rid`` cannot end a later request of the same name: the abort
goes to the schedulers on the same socket, before that request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypedDict, cast

from sglang.srt.managers.io_struct import EmbeddingReqInput

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager
    from sglang_inflight.frontend.workers.worker import Worker


class Group(TypedDict):
    """Requests of one call. A plain dict, because SGLang pickles requests into its dumps."""

    name: str
    # holds also for requests not yet made by SGLang
    is_aborted: bool


# attribute of a ``GenerateReqInput``: a group for each prompt, or one for all
_GROUPS = "inflight_groups"
# attribute of a single request's ``GenerateReqInput``, and of its copies: the request's group
_GROUP = "inflight_group"
# attribute of a ``ReqState``: abort as soon as the schedulers have the request
_IS_ABORTED = "inflight_is_aborted"


class Aborts:
    """Resolve names to requests of one ``TokenizerManager``, on its event loop."""

    def __init__(
        self, tokenizer_manager: TokenizerManager, worker: Callable[[], Worker | None]
    ) -> None:
        """``worker`` returns this process's tokenizer worker; None if there is one front end."""
        self._tokenizer_manager = tokenizer_manager
        self._worker = worker

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
        worker = self._worker()
        return self.here(names) if worker is None else await worker.abort(names)

    def here(self, names: Iterable[str]) -> int:
        """End this process's requests of these names. Return their number."""
        found = {name: self.named(name) for name in names}
        for name in found:
            self._tokenizer_manager.abort_request(name)
        return len({rid for rids in found.values() for rid in rids})

    def end(self, name: str) -> list[str]:
        """Return each ``rid`` for the schedulers to end.

        A request still being tokenized is ended when the schedulers have it: an abort sent before
        its request would find nothing.
        """
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


def _group_of(state: Any) -> Any:
    return getattr(state.obj, _GROUP, None)


def _group_name(state: Any) -> str | None:
    group = _group_of(state)
    return None if group is None else group["name"]


# ---- hooks -----------------------------------------------------------------------------


def name_groups(obj: Any, num: int) -> None:
    """Make groups before SGLang gives each request of a call a ``rid`` of its own."""
    if hasattr(obj, _GROUPS):
        return
    if isinstance(obj.rid, str):
        names = [obj.rid]
    elif isinstance(obj.rid, list) and obj.parallel_sample_num > 1:
        names = obj.rid
    else:
        return
    setattr(obj, _GROUPS, [Group(name=name, is_aborted=False) for name in names])


def join_groups(_: None, tm: TokenizerManager, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Set each ``obj[i]``'s group after SGLang has made the states of a call's requests.

    SGLang copies these objects for the samples of a prompt.
    """
    groups = getattr(obj, _GROUPS, None)
    if groups is not None:
        for index in range(len(obj.rid)):
            setattr(obj[index], _GROUP, groups[index % len(groups)])


def abort_request(
    abort: Callable[..., None],
    tm: PatchedTokenizerManager,
    rid: str = "",
    abort_all: bool = False,
) -> None:
    if abort_all or not rid:
        abort(tm, rid, abort_all)
        return
    for each in tm.inflight.aborts.end(rid):
        abort(tm, each)


def abort_when_dispatched(_: None, tm: PatchedTokenizerManager, rid: str) -> None:
    if tm.inflight.aborts.is_due(rid):
        tm.abort_request(rid)


def bind_abort_task(create: Callable[..., Any], tm: PatchedTokenizerManager, obj: Any) -> Any:
    """Bind SGLang's abort, two seconds after a stream's end, to the stream's own requests.

    The stream's name may belong to another request by then.
    """
    return create(tm, _RequestsOf(tm, obj))


def leave_to_the_stream(handle: object, rid: str | list[str]) -> None:
    """Skip gRPC's abort by name of a stream whose client has read nothing for minutes.

    The name may belong to another request by then. SGLang closes the stream next, and aborts the
    stream's remaining requests.
    """


def refuse_without_embedding(
    tm: TokenizerManager, out: dict[str, Any], state: Any, is_stream: bool
) -> None:
    """Turn an aborted embedding request into an error, before SGLang checks its finish reason.

    A text cut short is still an answer. An aborted embedding request has no embedding, and
    SGLang's routes fail when they look for it.
    """
    reason = out["meta_info"]["finish_reason"]
    is_aborted = reason.get("type") == "abort" and reason.get("status_code") is None
    if is_aborted and isinstance(state.obj, EmbeddingReqInput) and "embedding" not in out:
        reason["status_code"] = HTTPStatus.SERVICE_UNAVAILABLE
        reason["message"] = "the request was aborted before its embedding was computed; retry"


class _RequestsOf:
    """The part of a batch read by SGLang's abort task: names of unfinished requests."""

    is_single = False

    def __init__(self, tokenizer_manager: TokenizerManager, obj: Any) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._obj = obj

    @property
    def rid(self) -> list[str]:
        # a refused call has not been split into requests, and has no is_single
        is_single = getattr(self._obj, "is_single", True)
        requests = [self._obj] if is_single else [self._obj[i] for i in range(len(self._obj.rid))]
        states = self._tokenizer_manager.rid_to_state
        return [
            cast("str", each.rid)
            for each in requests
            if (state := states.get(each.rid)) is not None and state.obj is each
        ]
