"""Which requests an abort ends: those of one name, and none whose name only begins with it.

A request's name is its ``rid``. A client's call that SGLang serves as several requests, a batch or
``n`` samples of a prompt, has a name besides: the ``rid`` that the client gave. SGLang makes new
names for such requests, and an abort by the client's name would find none of them.

The front end knows each of its requests as an object, so it resolves a name here, and asks the
schedulers to end requests by the ``rid`` that they know (patch 0008). An abort that was asked for
by a request's own ``rid`` is bound to that request: it goes to the schedulers on the same socket,
and so before any later request of the name.
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
    """The requests of one call. A plain dict, because SGLang pickles requests into its dumps."""

    name: str
    # also those that SGLang has yet to make
    is_aborted: bool


# on a ``GenerateReqInput``: a group for each prompt, or one for all
_GROUPS = "inflight_groups"
# on the ``GenerateReqInput`` of one request, and on copies of it: the group that it belongs to
_GROUP = "inflight_group"
# on a ``ReqState`` that is to be ended as soon as the schedulers have it
_IS_ABORTED = "inflight_is_aborted"


class Aborts:
    """Resolves names to requests of one ``TokenizerManager``, on its event loop."""

    def __init__(
        self, tokenizer_manager: TokenizerManager, worker: Callable[[], Worker | None]
    ) -> None:
        """``worker`` says which of several workers this process is."""
        self._tokenizer_manager = tokenizer_manager
        self._worker = worker

    def named(self, name: str) -> list[str]:
        """The ``rid`` of the live request of that name, or of each that its group gives it to.

        SGLang itself aborts by the ``rid`` of one request, whose client has left, say. So a group
        of the same name is another client's, and goes on.
        """
        states = self._tokenizer_manager.rid_to_state
        if name in states:
            return [name]
        return [rid for rid, state in states.items() if _group_name(state) == name]

    async def everywhere(self, names: Iterable[str]) -> int:
        """End the requests of these names, of whichever worker. Returns how many it was."""
        names = list(names)
        worker = self._worker()
        return self.here(names) if worker is None else await worker.abort(names)

    def here(self, names: Iterable[str]) -> int:
        """End the requests of this process that have these names. Returns how many it was."""
        found = {name: self.named(name) for name in names}
        for name in found:
            self._tokenizer_manager.abort_request(name)
        return len({rid for rids in found.values() for rid in rids})

    def end(self, name: str) -> list[str]:
        """The ``rid`` of each request that the schedulers are to end.

        A request that they do not have yet, because it is still being tokenized, is ended when
        they have it: an abort that comes before a request would find nothing.
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
        """Whether an abort came before the schedulers had the request."""
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
    """Before SGLang gives each request of a call a ``rid`` of its own."""
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
    """After SGLang has made the states of a call's requests, out of ``obj[i]``.

    SGLang copies these objects for the samples that it makes of them.
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
    """Around SGLang's abort of what is left of a stream two seconds after its end.

    Its name may be another request's by then.
    """
    return create(tm, _RequestsOf(tm, obj))


def leave_to_the_stream(handle: object, rid: str | list[str]) -> None:
    """Instead of gRPC's abort of a stream whose client has taken nothing for minutes.

    Its name may be another request's by then. SGLang closes the stream next, and aborts what is
    left of its own requests.
    """


def refuse_without_embedding(
    tm: TokenizerManager, out: dict[str, Any], state: Any, is_stream: bool
) -> None:
    """Before SGLang looks whether the end of a request is an error.

    A text that ends early is an answer. Where an embedding was to come there is none, and routes
    that look for it fail.
    """
    reason = out["meta_info"]["finish_reason"]
    is_aborted = reason.get("type") == "abort" and reason.get("status_code") is None
    if is_aborted and isinstance(state.obj, EmbeddingReqInput) and "embedding" not in out:
        reason["status_code"] = HTTPStatus.SERVICE_UNAVAILABLE
        reason["message"] = "the request was aborted before it was computed; send it again"


class _RequestsOf:
    """What SGLang's task reads of a batch: the names of its requests that have not ended."""

    is_single = False

    def __init__(self, tokenizer_manager: TokenizerManager, obj: Any) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._obj = obj

    @property
    def rid(self) -> list[str]:
        # a call that was refused has not been taken apart
        is_single = getattr(self._obj, "is_single", True)
        requests = [self._obj] if is_single else [self._obj[i] for i in range(len(self._obj.rid))]
        states = self._tokenizer_manager.rid_to_state
        return [
            cast("str", each.rid)
            for each in requests
            if (state := states.get(each.rid)) is not None and state.obj is each
        ]
