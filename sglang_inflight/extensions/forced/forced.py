"""Puts a request's given tokens in the place of those that a forward samples.

The forward runs and samples as for any request. Patch 0010 then replaces the sampled token, before
SGLang computes log probabilities, feeds the token to the next forward and copies it to the host. So
logits, log probabilities, captured rows and labels are those of the given token, in a decoding step
with the numerics of sampling.

**Which token.** A forward that has computed ``s`` tokens of a request with a prompt of ``p`` tokens
samples output token ``s - p``. The number ``s`` is known at the launch, also under overlap
scheduling, where earlier results are unprocessed. A chunk before the prompt's last one samples
nothing of use. A retraction changes nothing: the second prefill computes the prompt and the output
so far, and samples the next token.

**Stops.** No stop token, stop string or grammar's end amid the given tokens ends the request. The
last one ends it, as it would end any request.

**Order.** The scheduler's thread enqueues the copy to the device on its own stream, and SGLang's
forward stream waits for that stream. SGLang keeps a forward's ``SamplingBatchInfo``, which holds
the tensor, for two further launches. So the memory is not used again before the forward has read
it. Each launch sets the tensor anew.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils import is_pin_memory_available

from sglang_inflight.extensions.forced import FORCED_TOKEN_IDS
from sglang_inflight.hooking import AROUND, BEFORE, SAMPLING, SCHEDULER, hook
from sglang_inflight.scheduler.controller import ENTRIES, PARTS, Controller
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# an attribute of ``SamplingBatchInfo`` that patch 0010 reads: int32, shape (requests,)
_ATTRIBUTE = "inflight_forced"
# in that tensor: the sampled token stays
_SAMPLED = -1


@dataclass(slots=True)
class _OfRequest:
    forced: Sequence[int] = ()


class Forced:
    """The given tokens of one scheduler's requests. Only the scheduler's thread touches it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pins_memory = is_pin_memory_available(device)
        # requests with given tokens, and some that have ended
        self._reqs: weakref.WeakSet[Req] = weakref.WeakSet()

    def admit(self, req: Req) -> None:
        forced = custom_param(req.sampling_params, FORCED_TOKEN_IDS)
        if forced is None or req in self._reqs:
            return
        record_of(req).part(_OfRequest).forced = forced
        req.update_finish_state = _Stops(req, len(forced))  # type: ignore[method-assign]
        self._reqs.add(req)

    @hook(
        f"{SCHEDULER}.run_batch",
        BEFORE,
        order=1,
        via=lambda scheduler: scheduler.inflight.part(Forced),
    )
    def put_into(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> None:
        """Give the forward of ``batch`` the tokens that replace those it samples."""
        info = batch.sampling_info
        if info is not None:
            setattr(info, _ATTRIBUTE, self._tokens(batch) if self._reqs else None)

    def _tokens(self, batch: ScheduleBatch) -> torch.Tensor | None:
        computed = batch.seq_lens_cpu.tolist()
        tokens = [
            forced_token(forced_tokens(req), count - len(req.origin_input_ids))
            for req, count in zip(batch.reqs, computed, strict=True)
        ]
        if all(token == _SAMPLED for token in tokens):
            return None
        on_host = torch.tensor(tokens, dtype=torch.int32, pin_memory=self._pins_memory)
        return on_host.to(self._device, non_blocking=True)


class _Stops:
    """Takes the place of one request's ``update_finish_state``: no other request pays for it."""

    def __init__(self, req: Req, count: int) -> None:
        # a strong reference would keep the request until the garbage collector runs
        self._req = weakref.ref(req)
        self._count = count

    def __call__(self, new_accepted_len: int = 1) -> None:
        req = self._req()
        assert req is not None
        most = req.sampling_params.max_new_tokens
        assert most is not None
        # an abort ends the request, and so does a pool without room for all tokens
        is_amid = req.to_finish is None and len(req.output_ids) < min(self._count, most)
        if not is_amid:
            type(req).update_finish_state(req, new_accepted_len)


def forced_tokens(req: Req) -> Sequence[int]:
    return record_of(req).part(_OfRequest).forced


def forced_token(forced: Sequence[int], place: int) -> int:
    """Return output token ``place``, or -1 where the request samples."""
    return forced[place] if 0 <= place < len(forced) else _SAMPLED


@PARTS.join()
def make_forced(controller: Controller) -> Forced:
    return Forced(controller.scheduler.device)


@ENTRIES.join(order=3)
def admit(controller: Controller, req: Req) -> None:
    controller.part(Forced).admit(req)


@hook(f"{SAMPLING}.copy_for_forward", AROUND)
def keep_on_the_copy(
    copy: Callable[..., SamplingBatchInfo], info: SamplingBatchInfo
) -> SamplingBatchInfo:
    """Hand the tokens to the copy that the forward reads."""
    copied = copy(info)
    setattr(copied, _ATTRIBUTE, getattr(info, _ATTRIBUTE, None))
    return copied
