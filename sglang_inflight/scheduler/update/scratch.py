"""Memory that a model's loader addresses in place of weights, for tensors that are in no plan.

    operation of the loader                         what happens
    a copy into one range of a weight               it is staged at once, as a move of a plan is
    any other that reads or writes a weight         the weight's memory is filled with what will be
                                                    served, and the operation runs on it

Filled memory is staged whole when it closes: at the end of the loader's call, or when open memory
takes more than its budget and this one was used longest ago. So neither the order nor the number of
a loader's writes matters, and the last one wins.

Where a whole update has not brought an element yet, no value of it is right. An operation that
reads such an element is refused.

Memory that no operation of torch's wrote (numpy, another thread) is noticed at the seal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.checks.coverage import holds_stray, stray_refusal
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.plans.moves import Box
from sglang_inflight.scheduler.update.plans.replay import Replay
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import Shadow
from sglang_inflight.scheduler.update.weight import Moved, Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused

_HOST = torch.device("cpu")


@dataclass
class _Scratch:
    weight: Weight
    handle: Handle
    is_own: bool
    # elements that the loader has written, or that were moved before it did
    written: Intervals = field(default_factory=Intervals)
    is_dirty: bool = False
    # whether elements may be staged that ``written`` does not have
    is_staged_whole: bool = False


class Scratch:
    """The scratch memory of one model. The staging thread owns it until the seal."""

    def __init__(
        self,
        model: nn.Module,
        foreign: Container[str],
        form: Form,
        rate_limit: RateLimit,
        budget: int,
        *,
        check_finite: bool,
    ) -> None:
        """``foreign``: names of weights that another model owns. ``budget``: bytes of open memory.

        ``check_finite``: no tensor holds NaN, so no weight may get it.
        """
        self._form = form
        self._rate_limit = rate_limit
        self._budget = budget
        self._check_finite = check_finite
        self._handles: dict[int, Handle] = {}
        self.shadow = Shadow(model, _HOST, self._handle_for, foreign)
        self._by_memory = {
            key: _Scratch(Weight(name, live), self._handles[key], name not in foreign)
            for name, live, own in self.shadow.pairs
            for key in [memory_key(own)]
        }
        self._by_name = {each.weight.name: each for each in self._by_memory.values()}
        self._open: OrderedDict[int, _Scratch] = OrderedDict()
        self._replay: Replay | None = None
        self._keeps = self._is_sealing = False

    def _handle_for(self, weight: torch.Tensor) -> torch.Tensor:
        handle = Handle(weight)
        self._handles[memory_key(handle.tensor)] = handle
        return handle.tensor

    @property
    def weights(self) -> Iterator[Weight]:
        """All weights of the model, also those that another model owns."""
        return (each.weight for each in self._by_memory.values())

    def begin(self, replay: Replay | None, *, keeps: bool) -> None:
        """Begin an update. ``replay``: of the plan, if the model has one.

        ``keeps``: elements that are not sent keep their value.
        """
        self.forget()
        self._replay, self._keeps, self._is_sealing = replay, keeps, False
        for each in self._by_memory.values():
            each.written, each.is_staged_whole = Intervals(), False

    def forget(self) -> None:
        """Give back all memory, and stage nothing of it."""
        for each in self._open.values():
            each.handle.release()
        self._open.clear()

    # ---- the loader's operations ---------------------------------------------------------

    def read(self, view: torch.Tensor) -> None:
        each = self._by_memory[memory_key(view)]
        name = each.weight.name
        if self._is_planned(each):
            assert self._replay is not None
            self._replay.flush()
            is_there = not self._replay.missing(name)
            # moves may have changed what is staged
            self._close(each)
        else:
            is_there = each.is_own and each.written.has_view(view, each.weight.live.itemsize)
        if not (is_there or self._is_sealing or (self._keeps and each.is_own)):
            raise Refused(
                f"the model's loader computes with {name!r} before its elements are sent, or while "
                "another model's update may change them: send the tensors in the checkpoint's "
                "order. SGLANG_INFLIGHT_STAGING=off writes updates in place instead"
            )
        self._fill(each)

    def copy(self, to: torch.Tensor, of: torch.Tensor, *, is_received: bool) -> bool:
        each = self._by_memory[memory_key(to)]
        live = each.weight.live
        is_range = to.is_contiguous() and to.dtype == live.dtype and of.dim() <= to.dim()
        if memory_key(to) in self._open or not is_range:
            return False
        self._leave(each)
        box, of = Box.of(to), of.expand(to.shape)
        if not is_received:
            self._refuse_stray(each.weight.name, of, box.view(live.data))
        if each.is_staged_whole or each.written.overlaps(box.offset, box.end):
            self._form.forget(each.weight, box.offset, box.end)
        self._form.move([Moved(each.weight, box, of)])
        each.written.add(box.offset, box.end)
        return True

    def write(self, view: torch.Tensor, *, sets_all: bool, reads: bool) -> None:
        each = self._by_memory[memory_key(view)]
        self._leave(each)
        if sets_all and not reads and view.nbytes == each.weight.live.nbytes:
            self._keep_open(each)
        else:
            self._fill(each)
        each.is_dirty = True
        if sets_all:
            each.written.add_view(view, each.weight.live.itemsize)

    def _is_planned(self, each: _Scratch) -> bool:
        return self._replay is not None and self._replay.has(each.weight.name)

    def _leave(self, each: _Scratch) -> None:
        """Let the loader write a planned weight, too."""
        if self._is_planned(each):
            assert self._replay is not None
            self._replay.leave([each.weight.name])
            self._close(each)
            for box in self._replay.sent(each.weight.name):
                each.written.add_view(box.view(each.handle.tensor), each.weight.live.itemsize)

    # ---- open memory ---------------------------------------------------------------------

    def _fill(self, each: _Scratch) -> None:
        if memory_key(each.handle.tensor) not in self._open:
            self._form.fill(each.weight, each.handle.tensor)
        self._keep_open(each)

    def _keep_open(self, each: _Scratch) -> None:
        key = memory_key(each.handle.tensor)
        self._open[key] = each
        self._open.move_to_end(key)
        while sum(one.weight.live.nbytes for one in self._open.values()) > self._budget:
            oldest = next(iter(self._open.values()))
            if oldest is each:
                break
            self._close(oldest)

    def _close(self, each: _Scratch) -> None:
        if self._open.pop(memory_key(each.handle.tensor), None) is None:
            return
        if each.is_dirty:
            self._refuse_stray(each.weight.name, each.handle.tensor, each.weight.live.data)
            self._form.put(each.weight, each.handle.tensor)
            each.is_staged_whole = True
        each.is_dirty = False
        each.handle.release()

    def close_all(self) -> None:
        """Stage what the loader's call has written."""
        while self._open:
            self._close(next(iter(self._open.values())))

    def _refuse_stray(self, name: str, new: torch.Tensor, served: torch.Tensor) -> None:
        if not self._check_finite:
            return
        for some, other in self._rate_limit.cut(new, served):
            if holds_stray(some, other):
                raise stray_refusal(name)

    # ---- the seal ------------------------------------------------------------------------

    def seal(self) -> None:
        """Let operations read weights as they will be served, from now on."""
        self._is_sealing = True

    def refuse_unseen(self) -> None:
        """Raise ``Refused`` if memory was written that no operation of torch's has."""
        self.close_all()
        for each in self._by_memory.values():
            if each.handle.is_touched():
                each.handle.release()
                raise Refused(
                    f"the model's loader uses the memory of {each.weight.name!r} past torch's "
                    "operations (through numpy, a kernel or another thread), where writes are not "
                    "seen: SGLANG_INFLIGHT_STAGING=off writes updates in place instead"
                )

    def unwritten(self, name: str) -> int:
        """Return how many elements of a weight no tensor wrote, that is not written by moves."""
        each = self._by_name[name]
        return each.weight.live.numel() - len(each.written)

    def note_whole(self, name: str) -> None:
        """Note that all elements of a weight came another way."""
        each = self._by_name[name]
        each.written.add(0, each.weight.live.numel())
