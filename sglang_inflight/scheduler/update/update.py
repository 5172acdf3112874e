"""One update on its way through one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_inflight.errors import Dropped
from sglang_inflight.messages import DiskSource, OpenCall
from sglang_inflight.scheduler.update.swap import PreparedSwap

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.model_runner import ModelRunner


@dataclass(frozen=True)
class Sealed:
    """A complete update that was checked: all that its commit needs."""

    # of all weights of this rank, as they will be
    digest: str
    swap: PreparedSwap
    # whose weights were read from disk, and where
    checkpoints: tuple[tuple[ModelRunner, DiskSource], ...]
    # elements of hollow weights that neither it nor one before has brought
    missing: int = 0


class Update:
    """What is known of an update between its ``OpenCall`` and its commit or drop.

    The staging thread writes it, but for ``dropped``, which the scheduler's thread sets
    and the staging thread looks at. The scheduler's thread reads counts as they are, and
    ``base_digest`` and ``sealed``. Each of these three is set once and never written into
    again, so none needs a lock.
    """

    def __init__(
        self,
        call: OpenCall,
        *,
        fills_hollow: bool = False,
        marks: bool = False,
        mends: frozenset[str] = frozenset(),
    ) -> None:
        """``fills_hollow``: nothing is served, so it is written where it is to be. ``marks``: it
        is the first since the weights are hollow, and marks all of them. ``mends``: the roles of
        models that are a mixture, which it has to bring."""
        self.id = call.update_id
        self.partial = call.partial
        self.may_be_empty = call.may_be_empty
        self.fills_hollow = fills_hollow
        self.marks = marks
        self.mends = mends
        self.roles: set[str] = set()
        # of these, those for which tensors came
        self.loaded: set[str] = set()
        self.names: set[str] = set()
        self.tensors = 0
        self.bytes = 0
        # by role, what was read from disk
        self.checkpoints: dict[str, DiskSource] = {}
        # of the live weights, where nobody had read them through before
        self.base_digest: str | None = None
        # the staging thread's last word: the rank has voted for it
        self.sealed: Sealed | None = None
        # why a call of this update failed, so that it cannot be sealed any more
        self.failed: str | None = None
        self.dropped: str | None = None
        self._deadline = float("inf")

    def allow(self, seconds: float) -> None:
        """Give the call that begins now this long. Renewed by each call."""
        self._deadline = time.monotonic() + seconds

    def check(self) -> None:
        """Raise ``Dropped`` when it is of no use to go on."""
        if self.dropped is not None:
            raise Dropped(f"the update was dropped: {self.dropped}")
        if self.failed is not None:
            raise Dropped(f"a call of the update failed: {self.failed}")
        if time.monotonic() > self._deadline:
            raise Dropped("the update's time ran out")
