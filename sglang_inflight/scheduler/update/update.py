"""The state of one update on one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_inflight.messages import DiskSource, OpenCall
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.tensor_digest import digest_of_all
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Dropped

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


Names = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Sealed:
    """A complete and checked update, with everything for its commit."""

    # digest of all weights of this rank after the commit
    digest: str
    swap: PreparedSwap
    # models read from disk, and the source of each
    checkpoints: tuple[tuple[ModelRunner, DiskSource], ...]
    # elements of hollow weights not sent by this update or an earlier one
    missing: int = 0
    staged_as: StagedChanges | None = None
    # names of received tensors, by the role of the model
    names: Names = field(default_factory=dict)


class Update:
    """State of an update between its ``OpenCall`` and its commit or drop.

    The staging thread writes everything but ``dropped``, which the scheduler's thread sets and the
    staging thread reads. The scheduler's thread reads the counts at any moment, and
    ``base_digest`` and ``sealed``. ``dropped``, ``base_digest`` and ``sealed`` are set once and
    never changed. So none needs a lock.
    """

    def __init__(
        self,
        call: OpenCall,
        *,
        base_version: str,
        fills_hollow: bool = False,
        marks: bool = False,
        kept: frozenset[str] = frozenset(),
        mends: frozenset[str] = frozenset(),
        needs: Names | None = None,
        live_digest: str | None = None,
    ) -> None:
        """``base_version`` is served as the update opens. ``fills_hollow``: no weights are served,
        so the update is written in place. ``marks``: the first update of hollow weights marks all
        of them. ``mends``: the roles of partially written models, which the update must bring.
        ``needs``: the names of tensors without which the update is refused, by role; None if a part
        of the weights will do. ``live_digest``: of the served weights, None if unknown.
        """
        self.id = call.update_id
        self.partial = call.partial
        self.may_be_empty = call.may_be_empty
        self.in_place = call.in_place
        self.base_version = base_version
        self.live_digest = live_digest
        self.fills_hollow = fills_hollow
        self.marks = marks
        # roles of models with contents, although the others' weights are hollow
        self.kept = kept
        self.mends = mends
        self.needs = needs
        self.roles: set[str] = set()
        # the roles among ``roles`` with received tensors
        self.loaded: set[str] = set()
        # names of received tensors, by the role of the model
        self.names: dict[str, set[str]] = {}
        # names of tensors of which a part came, and all of which has to, by the role of the model
        self.unpatched: dict[str, set[str]] = {}
        # whether a part of a tensor was received
        self.is_sparse = False
        self.tensors = 0
        self.bytes = 0
        self.asks_digests = call.asks_digests
        # digest of all tensors so far; None before the first call, and after a call without digests
        self.received_digest: str | None = None
        self._is_undigested = False
        # digest of the weights that another server has saved, if they came
        self.saved_digest: str | None = None
        # sources read from disk, by role
        self.checkpoints: dict[str, DiskSource] = {}
        # digest of the live weights, if the seal had to compute it
        self.base_digest: str | None = None
        # set last by the staging thread: the rank has voted for the update
        self.sealed: Sealed | None = None
        # why a call of this update failed; the update cannot be sealed then
        self.failed: str | None = None
        self.dropped: str | None = None
        # what the update does not take over from a checkpoint
        self.warnings: list[str] = []
        self._deadline = float("inf")

    def add_digests(self, digests: list[str] | None) -> None:
        """Add the digests of a call's tensors, or None if the call asked for none."""
        self._is_undigested = self._is_undigested or digests is None
        if self._is_undigested or digests is None:
            self.received_digest = None
            return
        before = [] if self.received_digest is None else [self.received_digest]
        self.received_digest = digest_of_all([*before, *digests])

    def note_unpatched(self, role: str, unpatched: set[str], arrived: set[str]) -> None:
        """Note that parts of tensors were not taken, and which tensors ``arrived`` whole."""
        waiting = self.unpatched.setdefault(role, set())
        waiting -= arrived
        waiting |= unpatched

    def warn(self, warning: str) -> None:
        """Have the receipt say ``warning``, once."""
        if warning not in self.warnings:
            self.warnings.append(warning)

    def allow(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now. Each call renews the deadline."""
        self._deadline = time.monotonic() + seconds

    def check(self) -> None:
        """Raise ``Dropped`` if the update was dropped, has failed or is out of time."""
        if self.dropped is not None:
            raise Dropped(f"the update was dropped: {self.dropped}")
        if self.failed is not None:
            raise Dropped(f"a call of the update failed: {self.failed}")
        if time.monotonic() > self._deadline:
            raise Dropped("the update's time ran out")
