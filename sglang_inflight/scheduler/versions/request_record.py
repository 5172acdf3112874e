"""This package's record of one request, in the attribute ``inflight`` of SGLang's ``Req``.

One ``Req`` serves a request from its arrival to its end. A retraction resets SGLang's own fields
and leaves ``inflight``. Batches share the ``Req``, and no ``Req`` is copied or crosses a process.
With prefill-decode disaggregation each of the two servers makes its own ``Req`` and record. The
record ends with its ``Req``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    class _AdoptedReq(Req):
        inflight: RequestRecord


Spans = list[dict[str, Any]]


@dataclass(slots=True)
class RequestRecord:
    """Only the scheduler's thread touches it."""

    # epoch of the first token's forward; None: no commit since, or no token
    first_epoch: int | None = None
    # versions of the KV used by a finished request
    kv_versions: Spans | None = None
    # label indices of ``KVVersions`` by position, while the KV is on the host, waiting for room
    kv_backup: torch.Tensor | None = None
    # the request ran across a fence, or moved with its KV: no other request may use this KV
    is_fenced_off: bool = False
    # before that, SGLang itself kept the request out of the prefix cache
    was_kept_out: bool = False


def record_of(req: Req) -> RequestRecord:
    """Return the record of ``req``, made at the first call: SGLang makes ``Req`` in many places."""
    record: RequestRecord | None = getattr(req, "inflight", None)
    if record is None:
        record = cast("_AdoptedReq", req).inflight = RequestRecord()
    return record
