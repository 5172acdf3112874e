"""Digests of staged weights, made while other tensors are on their way.

A weight is read as soon as all of its elements have come by the load plan. The wire brings the next
tensors meanwhile, and the seal reads what is left. Every staged element goes through a form, so the
form of this module sees what is staged of a weight after its reading, and forgets what was read.
The staging thread alone uses it, and reads on the stream on which it stages. The served weights do
not change while an update is open. So a line is that of the weight as a commit makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.swap import NumberSwap, PreparedSwap
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.tensor_digest import HostReader, TensorDigest
from sglang_inflight.vocabulary.answers import StagedChanges

# from here on xxhash, and the copy to the host, leave the interpreter to other threads
_LARGE_BYTES = 1 << 20


class DigestedForm(Form):
    """A form that keeps the lines of the digests of weights that it has read."""

    def __init__(self, form: Form, rate_limit: RateLimit) -> None:
        self._form = form
        self._rate_limit = rate_limit
        # keeps its pinned memory: an allocation of it may wait for the device
        self._reader = HostReader()
        # the name and the line by the weight's id, which the form below keeps unique
        self._lines: dict[int, tuple[str, str]] = {}

    def read_early(self, name: str, weight: Weight, check: Callable[[], None]) -> None:
        """Read ``weight``, of which all has come. ``check`` raises to give up."""
        self._lines[id(weight.live)] = name, self._read(name, weight, check)

    def line_of(self, name: str, weight: Weight, check: Callable[[], None]) -> str:
        """Return the line of ``weight``, as it will be served, in the name of ``name``."""
        read_as, line = self._lines.get(id(weight.live), ("", ""))
        return line if read_as == name else self._read(name, weight, check)

    def _read(self, name: str, weight: Weight, check: Callable[[], None]) -> str:
        one, pieces = TensorDigest(name, weight.live), self._form.as_committed(weight)
        return read_paced(one, self._reader, self._rate_limit, check, pieces)

    def _forget_line(self, weight: Weight) -> None:
        self._lines.pop(id(weight.live), None)

    # ---- what is staged --------------------------------------------------------------------

    def begin(self) -> None:
        self._lines.clear()
        self._form.begin()

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        self._forget_line(weight)
        self._form.expect(weight, keeps=keeps)

    def move(self, moved: Sequence[Moved]) -> None:
        for each in moved:
            self._forget_line(each.weight)
        self._form.move(moved)

    def move_row(self, targets: Targets, row: torch.Tensor) -> None:
        for weight in targets.weights:
            self._forget_line(weight)
        self._form.move_row(targets, row)

    def patch(self, patch: Patch, *, again: bool = False) -> None:
        self._forget_line(patch.weight)
        self._form.patch(patch, again=again)

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        self._forget_line(weight)
        self._form.put(weight, new)

    def forget(self, weight: Weight, start: int, end: int) -> None:
        self._forget_line(weight)
        self._form.forget(weight, start, end)

    # ---- the rest --------------------------------------------------------------------------

    def hold(self, weight: Weight) -> None:
        self._form.hold(weight)

    def fill(self, weight: Weight, memory: torch.Tensor) -> None:
        self._form.fill(weight, memory)

    def as_committed(self, weight: Weight) -> Iterable[torch.Tensor]:
        return self._form.as_committed(weight)

    def prepare(
        self, weights: Sequence[Weight], numbers: Sequence[NumberSwap] = ()
    ) -> PreparedSwap:
        return self._form.prepare(weights, numbers)

    def describe(self) -> StagedChanges:
        return self._form.describe()


def read_paced(
    one: TensorDigest,
    reader: HostReader,
    rate_limit: RateLimit,
    check: Callable[[], None],
    pieces: Iterable[torch.Tensor] | None = None,
) -> str:
    """Read the tensor of ``one``, or ``pieces`` in its place, and return the line of ``one``.

    ``pieces`` are flat. ``check`` raises to give up.
    """
    for piece in one.read(reader, pieces):
        if piece.nbytes >= _LARGE_BYTES:
            rate_limit.leave_out_time()
        rate_limit.spend(piece.nbytes)
        check()
    return one.line
