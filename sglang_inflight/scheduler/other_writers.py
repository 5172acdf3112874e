"""Guards SGLang's handlers that write live weights outside an update.

    SGLang's handler                       writes                               here
    check_weights, "reset_tensors"         noise, into all weights              hollow, or dirty
    handle_rpc_request                     anything, by a method of the user's  compared
    update_weights_from_*,                 an update, sent by a script on the   refused
    begin_, end_weight_update              scheduler's socket
    resume_memory_occupation, without      contents of the memory saver         no digest, no
    pauses                                                                      rollback

All other handlers of SGLang 0.5.23 only read weights, or do not touch them. Handlers run on the
scheduler's thread, between two steps, on all ranks of a replica in the same pass of their loops.
So all ranks see the same state of an update, and decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.update.copies import Copy
from sglang_inflight.scheduler.update.hollow import HollowWeights
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Conflict, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import MemoryRequest, Scheduler

_UPDATES = (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
)
_READ = ("checksum", "compare", "snapshot")
_RESET = "reset_tensors"


class OtherWriters:
    """Wraps the handlers above. Only the scheduler's thread calls it."""

    def __init__(self, scheduler: Scheduler, boundary: Boundary, hollow: HollowWeights) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._hollow = hollow

    @contextmanager
    def around(self, request: Any) -> Iterator[None]:
        """Wrap the handler of ``request``. Raise ``Refused`` or ``Conflict`` before it runs."""
        if isinstance(request, _UPDATES):
            raise Refused(
                f"{type(request).__name__} was sent to the scheduler directly: send updates by "
                "the server's HTTP routes, or by the Engine's methods"
            )
        if isinstance(request, CheckWeightsReqInput):
            check: CheckWeightsReqInput = request
            with self._checked(check.action):
                yield
        elif isinstance(request, RpcReqInput):
            rpc: RpcReqInput = request
            with self._compared(rpc.method):
                yield
        elif isinstance(request, ResumeMemoryOccupationReqInput):
            resume: MemoryRequest = request
            yield
            self._hollow.resumed_by_sglang(resume.tags)
        else:
            yield

    @contextmanager
    def _checked(self, action: str) -> Iterator[None]:
        if action in _READ:
            yield
            return
        if action != _RESET:
            raise Refused(f"unknown action {action!r}; there are {', '.join((*_READ, _RESET))}")
        kept = self._copy_tensors_not_in_checkpoints()
        # the forward in flight still reads these weights
        self._boundary.drain()
        try:
            yield
        finally:
            kept.put_back()
            self._hollow.overwritten("/weights_checker has overwritten them (reset_tensors)")

    def _copy_tensors_not_in_checkpoints(self) -> Copy:
        """Copy the tensors that updates cannot restore.

        Raise ``Conflict`` if any rank must keep its weights.
        """
        kept: Copy | None = None
        refusal = self._hollow.why_not_overwritten() or self._why_requests_would_end()
        if refusal is None:
            try:
                kept = self._hollow.copy_beside_updates()
            except (OSError, RuntimeError) as error:
                refusal = f"tensors outside checkpoints could not be copied: {error}"
        if is_true_on_any_rank(refusal is not None) or kept is None:
            raise Conflict(f"{_RESET}: {refusal or 'another rank refuses it'}")
        return kept

    def _why_requests_would_end(self) -> str | None:
        if self._scheduler._engine_paused:
            return None
        running = len(self._boundary.requests.running())
        waiting = len(self._boundary.requests.waiting())
        if not running + waiting:
            return None
        return (
            f"{running} requests run and {waiting} wait, and would end with 503. Let them end, or "
            "pause generation"
        )

    @contextmanager
    def _compared(self, method: str) -> Iterator[None]:
        """Compare the weights before and after a user's RPC method.

        SGLang's own methods write no weights, so they run unchecked.
        """
        if _is_sglangs(getattr(type(self._scheduler), method, None)):
            yield
            return
        before = self._read()
        try:
            yield
        finally:
            if is_true_on_any_rank(self._read() != before):
                self._hollow.overwritten(f"the RPC {method!r} has written them")

    def _read(self) -> str:
        """Return a checksum of this rank's weights, comparable on this rank only."""
        digest = Digest()
        for role, runner in self._scheduler.weight_updater._select_runners("all"):
            for name, weight in weights_of(runner.model):
                for _ in digest.read(f"{role}.{name}", weight):
                    pass
        return digest.hexdigest()


def _is_sglangs(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("sglang.")
