"""Which weights computed the KV that a request used.

A slot of the KV pool is written by one forward and read by any number of requests, after
commits too: a running request keeps its KV, and ``kv_cache="keep"`` lends old prefixes to
new requests. So the version is kept per slot: before each forward it is recorded for the slots
that the forward writes, and when a request ends it is read off the request's slots. Reuse,
retraction and recompute then need no rule of their own.

A speculating forward writes slots for several tokens, of which verification takes some. Under
overlap scheduling the host learns from the result, and not sooner, which slots those are. So the
version is recorded when the result is processed, for the slots of the tokens that were taken.

Spans show the slots that the request has at its end. One forward may have read another slot.
Where the whole prompt is cached, SGLang computes its last token anew, into a new slot, and then
puts the cached slot in its place. A forward that overlap scheduling launches between the two
reads the new slot, and the spans show the cached one.

With a hierarchical cache KV is copied to slots of the host and back, to other slots of the pool.
Its version goes with it. So it does where a decode server that is short of memory keeps a
request's KV on the host. KV that comes from a prefill server comes with its versions.

Stream order: recording and reading are enqueued on the scheduler's stream, as the allocation
of the slots and of a request's row are. So a read sees what was recorded before it. The host
waits for what it reads, and so for what that stream waits for: until the forward that was
launched last has read what the scheduler may write next. Of most that run as CUDA graphs SGLang
knows when that is. Of others, as a prefill may be, it waits for the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.utils import is_pin_memory_available

from sglang_inflight.scheduler.host_tier import count_host_slots
from sglang_inflight.scheduler.versions.request_record import Spans, record_of
from sglang_inflight.scheduler.versions.slots import count_slots
from sglang_inflight.version_label import VersionLabel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.scheduler.sglang_types.schedule_batch import ScheduleBatch
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler


# what made a request's KV, from its first position on: a label, and of how many positions
LabelRuns = list[tuple[VersionLabel, int]]


class KVVersions:
    """The version of every slot of one rank's pool. Only the scheduler's thread touches it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._device = scheduler.req_to_token_pool.req_to_token.device
        self._pins = is_pin_memory_available(self._device)
        # int32, one per slot's id: the index of a label. None while there is only one.
        self._of_slot: torch.Tensor | None = None
        # the same of the host's slots; None where there are none, too
        self._of_host_slot: torch.Tensor | None = None
        self._labels: list[VersionLabel] = []
        self._indices: dict[VersionLabel, int] = {}
        # of the labels that were this server's own, in order: the last is that of the next forward
        self._own: list[int] = []

    def change(self, old: VersionLabel, new: VersionLabel) -> None:
        """Forwards that are launched from now on write KV of ``new``."""
        self._begin(old)
        self._own.append(self._index(new))

    def _begin(self, current: VersionLabel) -> torch.Tensor:
        """All KV so far is of ``current``, if there was no other label before."""
        if self._of_slot is None:
            self._own = [self._index(current)]
            slots = count_slots(self._scheduler.token_to_kv_pool_allocator)
            self._of_slot = torch.zeros(slots, dtype=torch.int32, device=self._device)
            if (host_slots := count_host_slots(self._scheduler.tree_cache)) > 0:
                self._of_host_slot = torch.zeros(host_slots, dtype=torch.int32, device=self._device)
        return self._of_slot

    def _index(self, label: VersionLabel) -> int:
        if label not in self._indices:
            self._indices[label] = len(self._labels)
            self._labels.append(label)
        return self._indices[label]

    def has_been(self, label: VersionLabel) -> bool:
        """Was it this server's own, before or after a change? Others' name their server."""
        return label in self._indices

    def own_labels(self) -> Iterator[VersionLabel]:
        """Those before and after each change so far, the newest first."""
        return (self._labels[index] for index in reversed(self._own))

    def follow_to_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """The KV in ``slots`` is about to be copied to ``host_slots``."""
        if self._of_slot is not None and self._of_host_slot is not None:
            self._of_host_slot[self._here(host_slots)] = self._of_slot[self._here(slots)]

    def follow_from_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """The KV in ``host_slots`` is about to be copied to ``slots``."""
        if self._of_slot is not None and self._of_host_slot is not None:
            self._of_slot[self._here(slots)] = self._of_host_slot[self._here(host_slots)]

    def _here(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(self._device, torch.int64, non_blocking=True)

    def record_launch(self, batch: ScheduleBatch) -> None:
        """A forward of ``batch`` is about to be launched."""
        if self._of_slot is None or batch.out_cache_loc is None:
            return
        if batch.spec_algorithm.is_none() or batch.forward_mode.is_extend():
            self._of_slot.index_fill_(0, batch.out_cache_loc, self._own[-1])

    def record_taken(
        self, reqs: Sequence[Req], tokens: Sequence[list[int]], *, behind: int
    ) -> None:
        """A speculating forward brought each of ``reqs`` its ``tokens``.

        It was launched ``behind`` changes of the version ago.
        """
        if self._of_slot is None:
            return
        rows: list[int] = []
        positions: list[int] = []
        for req, taken in zip(reqs, tokens, strict=True):
            # upstream takes no token for these
            if not (req.is_retracted or req.finished()):
                end = req.kv.kv_committed_len
                positions += range(end - len(taken), end)
                assert req.kv.req_pool_idx is not None
                rows += [req.kv.req_pool_idx] * len(taken)
        at = torch.tensor([rows, positions], dtype=torch.int64, pin_memory=self._pins)
        row, position = at.to(self._device, non_blocking=True)
        slots = self._scheduler.req_to_token_pool.req_to_token[row, position]
        self._of_slot.index_fill_(0, slots.long(), self._own[-1 - behind])

    def record_received(self, req: Req, made_by: LabelRuns, current: VersionLabel) -> None:
        """Another server has written the KV of ``req``, and says who made it from its start on.

        But for a prefix that was found in this server's own cache, and was not sent.
        """
        if self._of_slot is None and all(label == current for label, _ in made_by):
            return
        of_slot = self._begin(current)
        slots = self._slots(req, req.kv.kv_committed_len)
        end = 0
        for label, length in made_by:
            start, end = max(end, req.kv.cache_protected_len), end + length
            if start < end:
                of_slot.index_fill_(0, slots[start:end], self._index(label))

    def back_up(self, req: Req) -> None:
        """The KV of ``req`` is about to be kept on the host, and its slots are let go."""
        if self._of_slot is None:
            # all is of the first label, and may not be when it comes back
            record_of(req).kv_backup = torch.zeros(1, dtype=torch.int32, device=self._device)
        else:
            record_of(req).kv_backup = self._of_slot[self._slots(req, req.seqlen - 1)]

    def restore(self, req: Req) -> None:
        """It comes back, to other slots."""
        record = record_of(req)
        backup, record.kv_backup = record.kv_backup, None
        # there is none where it comes to the host first from a prefill server
        if self._of_slot is not None and backup is not None:
            self._of_slot[self._slots(req, req.seqlen - 1)] = backup

    def read(self, req: Req, current: VersionLabel) -> Spans | None:
        """Spans of ``runs``. None where the slots do not tell."""
        made_by = self.runs(req, current)
        if made_by is None:
            return None
        spans: Spans = []
        start = 0
        for label, length in made_by:
            spans.append(label.span(start, start + length))
            start += length
        return spans

    def runs(self, req: Req, current: VersionLabel) -> LabelRuns | None:
        """Of the KV of ``req``: its prompt and its output, but for the last token.

        The last token was sampled and never computed. ``current`` is the label while
        there was only one. None where the slots do not tell: where chunks of prompts are
        mixed with speculation only the GPU knows them.
        """
        scheduler = self._scheduler
        if scheduler.is_mixed_chunk and not scheduler.spec_algorithm.is_none():
            return None
        used = min(req.kv.kv_committed_len, _computed(req))
        if used == 0:
            return []
        if self._of_slot is None:
            return [(current, used)]
        of_position = self._of_slot[self._slots(req, used)]
        indices, lengths = torch.unique_consecutive(of_position, return_counts=True)
        return [
            (self._labels[index], length)
            for index, length in zip(indices.tolist(), lengths.tolist(), strict=True)
        ]

    def _slots(self, req: Req, end: int) -> torch.Tensor:
        """Of the first ``end`` positions of ``req``."""
        return self._scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end].long()


def _computed(req: Req) -> int:
    return len(req.origin_input_ids) + max(0, len(req.output_ids_through_stop) - 1)
