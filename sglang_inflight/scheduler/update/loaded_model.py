"""A model that SGLang serves as its loader has left it.

The loader addresses scratch memory in place of weights, for tensors that are in no plan:

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

from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.checks.coverage import holds_stray, stray_refusal
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, Recorder, Target, Write
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.kind_of_model import KindOfModel
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import (
    Shadow,
    derives,
    refresh_derived,
    refuse_shared_memory,
)
from sglang_inflight.scheduler.update.swap import NumberSwap
from sglang_inflight.scheduler.update.weight import Moved, Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused

_HOST = torch.device("cpu")


class Derives(Refused):
    """Loading replaces something that no commit can exchange. ``name`` says what."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


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


class LoadedModel(KindOfModel, Recorder):
    """Loads an update's tensors past the served model.

    Tensors that the loader writes besides the weights are staged at the seal, like weights.

    Owners: the staging thread, from an update's begin to its seal. After that only the scheduler's
    thread touches what was staged. The commit's message orders the two.
    """

    def __init__(
        self,
        live: nn.Module,
        foreign: Container[str],
        form: Form,
        rate_limit: RateLimit,
        budget: int,
        *,
        check_finite: bool,
    ) -> None:
        """``foreign``: names of weights that another model owns. ``budget``: bytes of open memory.

        ``check_finite``: no tensor holds NaN, so no weight may get it.

        Raises ``Refused`` for weights in one memory.
        """
        refuse_shared_memory(live)
        self.form = form
        self._rate_limit = rate_limit
        self._budget = budget
        self._check_finite = check_finite
        self._shadow = Shadow(live, _HOST, Handle, foreign)
        self.model = self._shadow.model
        self._by_memory = {
            key: _Scratch(Weight(name, live), self._shadow.handles[key], name not in foreign)
            for name, live, own in self._shadow.pairs
            for key in [memory_key(own)]
        }
        self._by_name = {each.weight.name: each for each in self._by_memory.values()}
        self._open: OrderedDict[int, _Scratch] = OrderedDict()
        self._replay: Replay | None = None
        self._keeps = self._is_sealing = self._is_restored = False
        self._derives = derives(live)
        self.derived: list[Weight] = []
        self.numbers: list[NumberSwap] = []
        for each in self._by_memory.values():
            if each.is_own:
                form.hold(each.weight)

    @property
    def weights(self) -> Iterator[Weight]:
        return (each.weight for each in self._by_memory.values())

    @property
    def recorder(self) -> Recorder:
        return self

    def targets(self) -> dict[int, Target]:
        return self._shadow.targets()

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        self.forget()
        self.derived.clear()
        self._replay, self._keeps = replay, is_partial
        self._is_sealing = self._is_restored = False
        for each in self._by_memory.values():
            each.written, each.is_staged_whole = Intervals(), False

    def restore(self) -> None:
        if not self._is_restored:
            self._is_restored = True
            self._shadow.begin()

    def forget(self) -> None:
        for each in self._open.values():
            each.handle.release()
        self._open.clear()

    def note_write(self, write: Write) -> None:
        self._shadow.note_write(write)

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
            self.form.forget(each.weight, box.offset, box.end)
        self.form.move([Moved(each.weight, box, of)])
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
            self.form.fill(each.weight, each.handle.tensor)
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
            self.form.put(each.weight, each.handle.tensor)
            each.is_staged_whole = True
        each.is_dirty = False
        each.handle.release()

    def end_call(self) -> None:
        while self._open:
            self._close(next(iter(self._open.values())))

    def _refuse_stray(self, name: str, new: torch.Tensor, served: torch.Tensor) -> None:
        if not self._check_finite:
            return
        for some, other in self._rate_limit.cut(new, served):
            if holds_stray(some, other):
                raise stray_refusal(name)

    # ---- the seal ------------------------------------------------------------------------

    @torch.no_grad()
    def seal(self, *, was_loaded: bool) -> None:
        """Recompute what is derived from weights, and stage it. Raises ``Derives``, ``Refused``."""
        if not self._is_restored and not self._derives:
            return
        self.restore()
        # operations read weights as they will be served, from now on
        self._is_sealing = True
        with Dataflow(self.targets(), before_write=self.note_write, recorder=self):
            refresh_derived(self.model)
        self.end_call()
        self._refuse_unseen()
        if (name := self._shadow.find_derived()) is not None:
            raise Derives(name)
        for name, live, own in self._shadow.derived:
            self._refuse_stray(name, own, live)
            weight = Weight(name, live)
            self.form.expect(weight, keeps=True)
            self.form.put(weight, own)
            self.derived.append(weight)

    def _refuse_unseen(self) -> None:
        """Raise ``Refused`` if memory was written that no operation of torch's has."""
        for each in self._by_memory.values():
            if each.handle.is_touched():
                each.handle.release()
                raise Refused(
                    f"the model's loader uses the memory of {each.weight.name!r} past torch's "
                    "operations (through numpy, a kernel or another thread), where writes are not "
                    "seen: SGLANG_INFLIGHT_STAGING=off writes updates in place instead"
                )

    def unwritten(self, name: str) -> int:
        each = self._by_name[name]
        return each.weight.live.numel() - len(each.written)

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        self.form.put(weight, new)
        self._by_name[weight.name].written.add(0, weight.live.numel())
