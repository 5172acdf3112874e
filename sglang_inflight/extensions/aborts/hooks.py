"""Hooks by which SGLang names and aborts requests through ``Aborts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sglang_inflight.extensions.aborts.aborts import GROUP, GROUPS, Aborts, Group
from sglang_inflight.hooking import AFTER, AROUND, BEFORE, REPLACE, TOKENIZER_MANAGER, hook, with_us

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import TokenizerManager


@hook("sglang.srt.managers.io_struct.GenerateReqInput._normalize_rid", BEFORE)
def name_groups(obj: Any, num: int) -> None:
    """Make groups before SGLang gives each request of a call a ``rid`` of its own."""
    if hasattr(obj, GROUPS):
        return
    if isinstance(obj.rid, str):
        names = [obj.rid]
    elif isinstance(obj.rid, list) and obj.parallel_sample_num > 1:
        names = obj.rid
    else:
        return
    setattr(obj, GROUPS, [Group(name=name, is_aborted=False) for name in names])


@hook(f"{TOKENIZER_MANAGER}._init_req_state", AFTER, order=1, when=with_us)
def join_groups(_: None, tm: TokenizerManager, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Set each ``obj[i]``'s group after SGLang has made the states of a call's requests.

    SGLang copies these objects for the samples of a prompt.
    """
    groups = getattr(obj, GROUPS, None)
    if groups is not None:
        for index in range(len(obj.rid)):
            setattr(obj[index], GROUP, groups[index % len(groups)])


@hook(f"{TOKENIZER_MANAGER}.abort_request", AROUND, when=with_us)
def abort_request(
    abort: Callable[..., None],
    tm: PatchedTokenizerManager,
    rid: str = "",
    abort_all: bool = False,
) -> None:
    if abort_all or not rid:
        abort(tm, rid, abort_all)
        return
    for each in tm.inflight.part(Aborts).end(rid):
        abort(tm, each)


@hook(f"{TOKENIZER_MANAGER}._mark_state_dispatched", AFTER, when=with_us)
def abort_when_dispatched(_: None, tm: PatchedTokenizerManager, rid: str) -> None:
    if tm.inflight.part(Aborts).is_due(rid):
        tm.abort_request(rid)


@hook(f"{TOKENIZER_MANAGER}.create_abort_task", AROUND, when=with_us)
def bind_abort_task(create: Callable[..., Any], tm: PatchedTokenizerManager, obj: Any) -> Any:
    """Bind SGLang's abort, two seconds after a stream's end, to the stream's own requests.

    The stream's name may belong to another request by then.
    """
    return create(tm, _RequestsOf(tm, obj))


@hook("sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._abort_request_id", REPLACE, when=with_us)
def leave_to_the_stream(handle: object, rid: str | list[str]) -> None:
    """Skip gRPC's abort by name of a stream whose client has read nothing for minutes.

    The name may belong to another request by then. SGLang closes the stream next, and aborts the
    stream's remaining requests.
    """


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
