"""What callers want of an update, resolved when they call: nothing below looks at a body."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sglang_inflight.frontend.bodies import (
    BeginBody,
    DistributedBody,
    EndBody,
    OnBusy,
    TensorBody,
    UpdateBody,
    choose_kv_policy,
)
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.updates.kv_policy import as_sglang_does
from sglang_inflight.messages import KVPolicy, Selector, Source


@dataclass(frozen=True)
class Opening:
    """Of an update, one call or a session: what its ``OpenCall`` says, and whose it may be."""

    id: str
    selector: Selector | None
    # whether what is not sent stays
    partial: bool
    # what must be serving when it begins
    expected_version: str | None
    is_session: bool = False
    # whether calls that name no session may be pieces of this one
    takes_unnamed: bool = False
    lease_s: float | None = None

    @classmethod
    def of_session(cls, body: BeginBody) -> Opening:
        return cls(
            id=body.new_id or uuid.uuid4().hex,
            selector=body.selector,
            partial=body.partial,
            expected_version=body.expected_version,
            is_session=True,
            takes_unnamed=not body.non_blocking,
            lease_s=body.lease_s,
        )

    @classmethod
    def of_call(cls, wanted: Wanted) -> Opening:
        return cls(
            id=uuid.uuid4().hex,
            selector=wanted.selector,
            partial=wanted.partial,
            expected_version=wanted.expected_version,
        )


@dataclass(frozen=True)
class Wanted:
    """Of a call that brings tensors: a whole update, or a piece of a session."""

    source: Source
    deadline: Deadline
    # the session that it must be a piece of
    session_id: str | None
    # where a session is open, upstream takes it for a piece of that
    is_upstreams_piece: bool
    on_busy: OnBusy
    selector: Selector | None
    partial: bool
    expected_version: str | None
    weight_version: str | None
    kv_policy: KVPolicy
    # whether SGLang has no such call, so that less than the policy is an error
    uses_our_fields: bool
    # whether the policy holds for the whole session, whatever calls before said
    kv_policy_is_explicit: bool
    # stage while requests run
    non_blocking: bool
    # at the commit, all of them
    aborts_requests: bool
    torch_empty_cache: bool

    @classmethod
    def of(cls, body: UpdateBody, source: Source, deadline: Deadline) -> Wanted:
        """``source`` is that of ``body``: each time it is asked for, it is another one."""
        uses_our_fields = body.kv_cache is not None or body.non_blocking
        return cls(
            source=source,
            deadline=deadline,
            session_id=body.session_id,
            is_upstreams_piece=isinstance(body, TensorBody | DistributedBody)
            and not body.non_blocking,
            on_busy=body.on_busy,
            selector=body.selector,
            partial=body.is_partial,
            expected_version=body.expected_version,
            weight_version=body.weight_version,
            kv_policy=body.kv_policy if uses_our_fields else as_sglang_does(body.kv_policy),
            uses_our_fields=uses_our_fields,
            kv_policy_is_explicit=body.kv_cache is not None or body.flush_cache,
            non_blocking=body.non_blocking,
            aborts_requests=body.abort_all_requests,
            torch_empty_cache=body.torch_empty_cache,
        )


@dataclass(frozen=True)
class Ending:
    """Of the call that ends a session. None: as its pieces said."""

    weight_version: str | None
    kv_policy: KVPolicy | None
    non_blocking: bool
    torch_empty_cache: bool

    @property
    def uses_our_fields(self) -> bool:
        return self.kv_policy is not None or self.non_blocking

    @classmethod
    def of(cls, body: EndBody) -> Ending:
        says_policy = body.kv_cache is not None or body.flush_cache is not None
        return cls(
            weight_version=body.weight_version,
            kv_policy=choose_kv_policy(bool(body.flush_cache), body.kv_cache)
            if says_policy
            else None,
            non_blocking=body.non_blocking,
            torch_empty_cache=body.torch_empty_cache,
        )
