"""What we know of one request: one object, on SGLang's ``Req``, in its attribute ``inflight``.

It is the same ``Req`` from the request's coming to its end. A retraction resets SGLang's own
fields on it and leaves this one, batches share it, and no ``Req`` is copied or crosses a
process: with prefill-decode disaggregation each of the two servers makes one of its own, and
so has a record of its own. The record goes when the ``Req`` goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from sglang_inflight.scheduler.sglang_types.req import Req

if TYPE_CHECKING:
    import torch

Spans = list[dict[str, Any]]


@dataclass(slots=True)
class RequestRecord:
    """Only the scheduler's thread touches it."""

    # whose weights the first token's forward was launched with; None: no commit came since, or
    # there is no token
    first_epoch: int | None = None
    # of a request that has ended: by what weights the KV was computed that it used
    kv_versions: Spans | None = None
    # of KV that the host keeps while the request waits for room: the versions of its positions, as
    # ``KVVersions`` counts them
    kv_backup: torch.Tensor | None = None
    # it ran across a fence, or moved with its KV: that KV is nobody else's
    is_fenced_off: bool = False
    # SGLang itself kept it out of the prefix cache before that
    was_kept_out: bool = False


class _AdoptedReq(Req, Protocol):
    inflight: RequestRecord


def record_of(req: Req) -> RequestRecord:
    """Made when it is first asked for, because SGLang makes a ``Req`` in many places."""
    record: RequestRecord | None = getattr(req, "inflight", None)
    if record is None:
        record = cast(_AdoptedReq, req).inflight = RequestRecord()
    return record
