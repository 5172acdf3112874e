"""The weights that a sender's servers serve: the base of the next version's changes.

The sender keeps a snapshot of the last version, and the digests of the ranks after its commit.
Equal digests prove that the ranks still serve the snapshot, whatever happened meanwhile: another
trainer's update, a rollback, a restart. The sender compares them within its session, because no
other commit can come then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.client.buckets import Piece
from sglang_inflight.client.changes import Snapshot
from sglang_inflight.vocabulary.answers import RankReceipt, RankStatus, Receipt, Status
from sglang_inflight.vocabulary.bodies import Selector

if TYPE_CHECKING:
    import torch

    from sglang_inflight.client.changes import NamedTensor

# a server's URL -> each rank's place and its digest, None if the rank has none
Digests = dict[str, list[tuple[int, int, int, str | None]]]


class NotFromBase(Exception):
    """The version cannot be sent as changes of the base: send it whole."""


class Base(NamedTuple):
    """The servers' weights after a commit of the sender."""

    digests: Digests
    # whether the servers took the snapshot for a whole version
    is_whole: bool
    # which models have these weights
    selector: Selector | None

    def fits(self, partial: bool, selector: Selector | None) -> bool:
        """Return whether an update with these fields may be sent as changes."""
        return (partial or self.is_whole) and selector == self.selector

    def require_served(self, digests: Digests) -> None:
        """Raise ``NotFromBase`` if a rank's digest is another one, or none.

        A fleet may have another server than at the commit, and lack one.
        """
        for url in self.digests.keys() | digests.keys():
            if self.digests.get(url) != digests.get(url):
                raise NotFromBase(f"{url} serves other weights than the last ones sent")


def digests_of(answers: Mapping[str, Receipt] | Mapping[str, Status]) -> Digests:
    return {url: sorted(map(_digest_of, answer.ranks)) for url, answer in answers.items()}


def _digest_of(rank: RankReceipt | RankStatus) -> tuple[int, int, int, str | None]:
    return rank.dp_rank, rank.tp_rank, rank.pp_rank, rank.digest


class Version:
    """A version being sent. The trainer's tensors are read once, in their order.

    Making a tensor may be a collective of the trainer's ranks, and each takes part once, however
    the version is sent. A second try reads the tensors from the snapshot.
    """

    def __init__(self, named_tensors: Iterable[NamedTensor], snapshot: Snapshot) -> None:
        self._rest = iter(named_tensors)
        self._snapshot = snapshot
        # names taken so far
        self._taken: list[str] = []
        # whether the trainer's own generator raised: its other tensors are lost
        self._is_broken = False

    @property
    def can_be_sent_again(self) -> bool:
        """True if tensors were taken, and none was lost."""
        return bool(self._taken) and not self._is_broken

    def changes(self, *, partial: bool, whole: Collection[str] = ()) -> Iterator[Piece]:
        """Bring the snapshot up to date, and yield what has changed, and the tensors ``whole``.

        A tensor is sent whole if that is smaller, and if the servers take no sparse values of its
        dtype, or no such value. Raises ``NotFromBase`` at the end if a tensor is missing, unless
        the update is ``partial``.
        """
        for name, tensor in self._take():
            change = self._snapshot.follow(name, tensor)
            self._taken.append(name)
            if change is None or name in whole or not are_taken_sparse(change.values):
                yield Piece.whole(name, tensor)
            elif len(change.indices):
                yield Piece.sparse(name, change)
        if not partial:
            self._require_all()

    def whole(self) -> Iterator[Piece]:
        """Make the snapshot anew, and yield all tensors, those taken before too."""
        for name in self._taken:
            yield Piece.whole(name, self._snapshot[name])
        for name, tensor in self._take():
            self._snapshot.hold(name, tensor)
            self._taken.append(name)
            yield Piece.whole(name, tensor)
        self._snapshot.forget(self._missing())

    def _take(self) -> Iterator[NamedTensor]:
        # no ``yield from``: it would close the trainer's generator together with this one
        while True:
            try:
                pair = next(self._rest)
            except StopIteration:
                return
            except BaseException:
                self._is_broken = True
                raise
            yield pair

    def _require_all(self) -> None:
        if missing := self._missing():
            raise NotFromBase(f"{min(missing)!r} was there before, and is missing")

    def _missing(self) -> Collection[str]:
        return self._snapshot.keys() - set(self._taken)


def are_taken_sparse(values: torch.Tensor) -> bool:
    """Return whether servers take these ``values``: finite, of a float dtype of 2 bytes or more."""
    return values.is_floating_point() and values.itemsize >= 2 and bool(values.isfinite().all())
