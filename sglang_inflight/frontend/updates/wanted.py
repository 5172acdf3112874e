"""Callers' wishes for an update, read from the body once; later code reads no body."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import msgspec

from sglang_inflight.capabilities import as_sglang_does
from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.messages import (
    SERVED,
    SERVED_ELSEWHERE,
    SPARSE,
    AskedDigests,
    DiskSource,
    DistributedSource,
    IPCSource,
    PartsSource,
    PeerSource,
    SavedFolderSource,
    Selector,
    ServedSource,
    Source,
    SparseFolderSource,
    TensorSource,
)
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.bodies import (
    BeginBody,
    DiskBody,
    DistributedBody,
    EndBody,
    IPCBody,
    LaidOutBody,
    OnBusy,
    PartsBody,
    PeerBody,
    TensorBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.kept_kv import KeptKV, choose_kept_kv


@singledispatch
def source_of(body: UpdateBody) -> Source:
    """Return where the tensors of an update come from. Each call makes a new source."""
    raise TypeError(body)


@source_of.register
def _(body: DiskBody) -> Source:
    if body.load_format == SPARSE:
        return SparseFolderSource(model_path=body.model_path)
    if body.load_format == SERVED:
        return SavedFolderSource(model_path=body.model_path)
    return DiskSource(model_path=body.model_path, load_format=body.load_format)


@source_of.register
def _(body: TensorBody) -> Source:
    return TensorSource(
        serialized_named_tensors=[*body.serialized_named_tensors],
        load_format=body.load_format,
        **_layout_of(body),
    )


@source_of.register
def read_distributed(body: DistributedBody) -> DistributedSource:
    return DistributedSource(
        group_name=body.group_name, load_format=body.load_format, **_layout_of(body)
    )


def _layout_of(body: LaidOutBody) -> dict[str, Any]:
    return {
        "names": body.names or [],
        "dtypes": body.dtypes or [],
        "shapes": body.shapes or [],
        # a layout of no tensors needs no name
        "layout_digest": None if body.names == [] else body.layout_digest,
    }


@source_of.register
def _(body: PartsBody) -> Source:
    return PartsSource(
        wire=body.wire,
        body=body.body,
        group_name=body.group_name,
        load_format=body.load_format,
    )


@source_of.register
def _(body: PeerBody) -> Source:
    return PeerSource(offer_id=body.offer_id, token=body.token, ranks=body.ranks)


@source_of.register
def _(body: IPCBody) -> Source:
    return IPCSource(zmq_handles=body.zmq_handles)


@dataclass(frozen=True)
class Opening:
    """How an update opens: the ``OpenCall``'s fields, and whose calls may add to it."""

    id: str
    selector: Selector | None
    # missing tensors keep their values
    partial: bool
    # version that must be served at the opening
    expected_version: str | None
    # the tensors of the last session like this must come
    as_before: bool = False
    is_session: bool = False
    # whether calls without a session_id may be pieces of this session
    takes_unnamed: bool = False
    lease_s: float | None = None
    # why the update is written in place, while requests wait; None if it is staged
    why_in_place: str | None = None
    # the ranks compute digests of all tensors as they come
    asks_digests: bool = False

    @property
    def may_be_empty(self) -> bool:
        """True if the update may end without a tensor, because a trainer may use RDMA."""
        return self.takes_unnamed and self.partial and not self.as_before

    @classmethod
    def of_session(cls, body: BeginBody, sessions: str) -> Opening:
        """``sessions`` is the setting of this name. An explicit ``partial`` overrides it.

        Raises ``Refused`` if ``sessions`` asks for a whole draft: a draft loads some tensors of a
        checkpoint, and nothing shows which of them are missing.
        """
        if body.partial is None and sessions == "whole" and body.selector == "draft":
            raise Refused(
                "SGLANG_INFLIGHT_SESSIONS=whole cannot tell whether a draft is whole: begin the "
                "session with partial=true"
            )
        return cls(
            id=body.new_id or uuid.uuid4().hex,
            selector=body.selector,
            partial=sessions != "whole" if body.partial is None else body.partial,
            as_before=sessions == "as_before" and body.partial is None,
            expected_version=body.expected_version,
            is_session=True,
            takes_unnamed=not body.non_blocking,
            lease_s=body.lease_s,
            asks_digests=body.received_digest,
        )

    @classmethod
    def of_call(cls, wanted: Wanted, why_in_place: str | None = None) -> Opening:
        return cls(
            id=uuid.uuid4().hex,
            selector=wanted.selector,
            partial=wanted.partial,
            expected_version=wanted.expected_version,
            why_in_place=why_in_place,
            asks_digests=wanted.digests is not None,
        )


@dataclass(frozen=True)
class Wanted:
    """The wishes of a call with tensors: a whole update, or a piece of a session."""

    source: Source
    deadline: Deadline
    # the call must be a piece of this session
    session_id: str | None
    # SGLang would take the call for a piece of an open session
    is_upstreams_piece: bool
    on_busy: OnBusy
    selector: Selector | None
    partial: bool
    expected_version: str | None
    weight_version: str | None
    kept_kv: KeptKV
    # the call uses our fields, so an unsupported policy is an error
    uses_our_fields: bool
    # the policy overrides those of earlier calls of the session
    kept_kv_is_explicit: bool
    # stage while requests run
    non_blocking: bool
    # abort all requests at the commit
    aborts_requests: bool
    torch_empty_cache: bool
    # the ranks compute digests of the call's tensors as they come; None if they need not
    digests: AskedDigests | None
    # digest of all tensors of the call together
    expected_digest: str | None

    @classmethod
    def of(cls, body: UpdateBody, source: Source, deadline: Deadline, can: Capabilities) -> Wanted:
        """Read ``body``. ``source`` is its source, made once by ``source_of``."""
        says_policy = body.kv_cache is not None or body.kv_max_age is not None
        uses_our_fields = says_policy or body.non_blocking
        return cls(
            source=source,
            deadline=deadline,
            session_id=body.session_id,
            is_upstreams_piece=isinstance(body, TensorBody | DistributedBody)
            and not body.non_blocking,
            on_busy=body.on_busy,
            selector=_selector_of(body, source),
            partial=body.is_partial,
            expected_version=body.expected_version,
            weight_version=body.weight_version,
            kept_kv=body.kept_kv if uses_our_fields else as_sglang_does(body.kept_kv, can),
            uses_our_fields=uses_our_fields,
            kept_kv_is_explicit=says_policy or body.flush_cache,
            non_blocking=body.non_blocking,
            aborts_requests=body.abort_all_requests,
            torch_empty_cache=body.torch_empty_cache,
            digests=_digests_of(body),
            expected_digest=body.expected_digest,
        )


def _selector_of(body: UpdateBody, source: Source) -> Selector | None:
    """Return the body's selector. Raises ``Refused`` if it or a digest is out of place."""
    if not isinstance(source, ServedSource):
        return body.selector
    if body.selector not in (None, "all"):
        raise Refused(f"selector {body.selector!r}: {SERVED_ELSEWHERE} come for all models")
    if body.partial or _digests_of(body) is not None:
        raise Refused(
            f"{SERVED_ELSEWHERE} come whole, and have digests of their own: leave out partial, "
            "expected_digests, expected_digest and received_digest"
        )
    return "all"


def _digests_of(body: UpdateBody) -> AskedDigests | None:
    if body.expected_digests is not None:
        return AskedDigests(expected=msgspec.json.encode(body.expected_digests))
    is_asked = body.received_digest or body.expected_digest is not None
    return AskedDigests() if is_asked else None


@dataclass(frozen=True)
class Ending:
    """The wishes of a call ending a session. None leaves the choice to its pieces."""

    weight_version: str | None
    kept_kv: KeptKV | None
    non_blocking: bool
    torch_empty_cache: bool
    # digest of all tensors of the session together
    expected_digest: str | None

    @property
    def uses_our_fields(self) -> bool:
        return self.kept_kv is not None or self.non_blocking

    @classmethod
    def of(cls, body: EndBody) -> Ending:
        says_policy = (body.kv_cache, body.kv_max_age, body.flush_cache) != (None, None, None)
        return cls(
            weight_version=body.weight_version,
            kept_kv=choose_kept_kv(
                body.kv_cache, body.kv_max_age, flush_cache=bool(body.flush_cache)
            )
            if says_policy
            else None,
            non_blocking=body.non_blocking,
            torch_empty_cache=body.torch_empty_cache,
            expected_digest=body.expected_digest,
        )
