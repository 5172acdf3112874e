"""Records the weights behind the KV of each request.

One forward writes a slot of the KV pool. Any number of requests read the slot, even after commits:
a running request keeps its KV, and ``kv_cache="keep"`` lends old prefixes to new requests. So the
version is kept per slot. Before each forward the version is recorded for the slots to be written.
When a request ends, the versions are read from the request's slots. Reuse, retraction and recompute
need no rule of their own. At the end the prefix cache may hold older KV of the same tokens, and
SGLang then puts the cached slots into the request's row. So the row is read before SGLang caches
it: the slots are those of the request's last forward.

A speculating forward writes slots for several tokens, and verification takes some of them. Under
overlap scheduling the host learns these slots only from the result. So the version is recorded when
the result is processed, for the slots of the taken tokens.

The forward of a prefill may have read other slots. SGLang caches a prompt after its prefill, too.
If the cache holds older KV of these tokens by then, later forwards read the cached slots, and the
spans show these. The prefill has read its own slots, and so has, with overlap scheduling, the
forward after it. A prompt that is cached whole is such a case, with its last token.

With a hierarchical cache KV is copied to slots of the host, and back to other slots of the pool.
The versions are copied too. The same holds for a decode server short of memory, with a request's KV
on the host. KV from a prefill server comes with its versions.

Stream order: recording and reading are enqueued on the scheduler's stream, like the allocation of
the slots and of a request's row. So a read sees all earlier records. The host waits for the read,
and so for the stream's own wait: until the last launched forward has read the data that the
scheduler may write next. For most forwards in CUDA graphs SGLang knows that moment. For others,
such as a prefill, the stream waits for the forward's end.

An allocator's ``size`` may be smaller: the size of the smaller one of two pools, or the part of
shared memory left by other pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import UnifiedSWAAllocatorBase
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.utils import is_pin_memory_available

from sglang_inflight.scheduler.host_tier import count_host_slots
from sglang_inflight.scheduler.requests import Spans, record_of
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

    from sglang_inflight.sglang_types import Scheduler


def count_slots(allocator: BaseTokenToKVPoolAllocator) -> int:
    """Return a bound above each slot id in requests and batches.

    Ids begin after the first page: the first page takes the writes of padding.
    """
    slots, first = allocator.size_full, allocator.page_size
    if isinstance(allocator, UnifiedSWAAllocatorBase | UnifiedMambaTokenToKVPoolAllocator):
        # virtual ids: memory is assigned when an id is handed out
        slots = max(slots, allocator.draft_virtual_id_space)
    if isinstance(allocator, PageInterleavePoolAllocator):
        # the first page of each rank
        first *= allocator.shard_size
    return slots + first


# the labels of a request's KV from its first position on, each with a number of positions
LabelRuns = list[tuple[VersionLabel, int]]


class KVVersions:
    """The version of each slot of one rank's pool. Only the scheduler's thread touches this."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._device = scheduler.req_to_token_pool.req_to_token.device
        self._pins = is_pin_memory_available(self._device)
        # int32, by slot id: the index of a label. None while there is only one label.
        self._of_slot: torch.Tensor | None = None
        # the same for the host's slots; None also if there are none
        self._of_host_slot: torch.Tensor | None = None
        self._labels: list[VersionLabel] = []
        self._indices: dict[VersionLabel, int] = {}
        # indices of this server's own labels, in order; the last is the next forward's
        self._own: list[int] = []

    def change(self, old: VersionLabel, new: VersionLabel) -> None:
        """Label the KV of forwards launched from now on with ``new``."""
        self._begin(old)
        self._own.append(self._index(new))

    def _begin(self, current: VersionLabel) -> torch.Tensor:
        """Begin to keep labels per slot. All KV so far gets ``current``."""
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
        """Return whether ``label`` was this server's own at any time; others name their server."""
        return label in self._indices

    def own_labels(self) -> Iterator[VersionLabel]:
        """Return this server's own labels so far, the newest first."""
        return (self._labels[index] for index in reversed(self._own))

    def follow_to_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the labels of ``slots`` to ``host_slots``, before the KV is copied."""
        if self._of_slot is not None and self._of_host_slot is not None:
            self._of_host_slot[self._here(host_slots)] = self._of_slot[self._here(slots)]

    def follow_from_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the labels of ``host_slots`` to ``slots``, before the KV is copied."""
        if self._of_slot is not None and self._of_host_slot is not None:
            self._of_slot[self._here(slots)] = self._of_host_slot[self._here(host_slots)]

    def _here(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(self._device, torch.int64, non_blocking=True)

    def record_launch(self, batch: ScheduleBatch, made_by: VersionLabel | None = None) -> None:
        """Label the slots of ``batch``, before its forward is launched.

        ``made_by``: the label of the forward's weights if the next forward's is not it.
        """
        if self._of_slot is None or batch.out_cache_loc is None:
            return
        if batch.spec_algorithm.is_none() or batch.forward_mode.is_extend():
            index = self._own[-1] if made_by is None else self._index(made_by)
            self._of_slot.index_fill_(0, batch.out_cache_loc, index)

    def record_taken(
        self, reqs: Sequence[Req], tokens: Sequence[list[int]], *, behind: int
    ) -> None:
        """Label the slots of the ``tokens`` of ``reqs``, from a speculating forward.

        The forward was launched ``behind`` changes of the version ago.
        """
        if self._of_slot is None:
            return
        rows: list[int] = []
        positions: list[int] = []
        for req, taken in zip(reqs, tokens, strict=True):
            # SGLang takes no token for these
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
        """Label the KV of ``req`` received from another server, from its first position on.

        A prefix found in this server's own cache was not sent, and keeps its labels.
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
        """Save the labels of ``req``, before its KV moves to the host and its slots are freed."""
        if self._of_slot is None:
            # there is only the first label now, but maybe not at the KV's return
            record_of(req).kv_backup = torch.zeros(1, dtype=torch.int32, device=self._device)
        else:
            record_of(req).kv_backup = self._of_slot[self._slots(req, req.seqlen - 1)]

    def restore(self, req: Req) -> None:
        """Restore the labels of ``req`` with its KV, to other slots."""
        record = record_of(req)
        backup, record.kv_backup = record.kv_backup, None
        # None if a prefill server sent the KV to the host first
        if self._of_slot is not None and backup is not None:
            self._of_slot[self._slots(req, req.seqlen - 1)] = backup

    def read(self, req: Req, current: VersionLabel) -> Spans | None:
        """Return ``runs`` as spans, or None if the slots do not tell."""
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
        """Return the labels of the KV of ``req``: the prompt and all output but the last token.

        The last token was sampled, and its KV never computed. ``current`` is used while there is
        only one label. Return None with chunked prompts mixed with speculation: then only the GPU
        knows the slots.
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
        """Return the slots of the first ``end`` positions of ``req``."""
        return self._scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end].long()


def _computed(req: Req) -> int:
    return len(req.origin_input_ids) + max(0, len(req.output_ids_through_stop) - 1)
