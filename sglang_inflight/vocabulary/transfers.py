"""Says who sends which part of which tensor to whom: every rank derives the same list.

A trainer's ranks have regions of tensors, and a server's ranks want regions. A sender and a
receiver derive what goes between them from both lists, so no message says it. Nothing is gathered:
a wanted element comes from one rank that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_inflight.vocabulary.regions import Region

# regions that a tensor has on each rank; none on one that has nothing of it
Regions = tuple[tuple[Region, ...], ...]


class Part(NamedTuple):
    """A region that rank ``source`` of the trainer sends."""

    source: int
    region: Region


class NotHeld(ValueError):
    """No rank of the trainer has an element that a rank of the server wants."""


def parts_of(wanted: Region, held: Regions, first: int = 0) -> list[Part]:
    """Return who sends which part of ``wanted``. The parts have each element once.

    ``first``: the rank that is asked first. Replicas on several ranks share the work, because each
    tensor asks another one first. Raises ``NotHeld``.
    """
    found: list[Part] = []
    missing = [wanted]
    for turn in range(len(held)):
        source = (first + turn) % len(held)
        for region in held[source]:
            left: list[Region] = []
            for each in missing:
                if (both := each.overlap(region)) is not None:
                    found.append(Part(source, both))
                    left += each.without(both)
                else:
                    left.append(each)
            missing = left
        if not missing:
            return found
    raise NotHeld(f"no rank has the elements {missing[0]}")


class Transfers:
    """The parts of all tensors, for all ranks of a trainer and of its servers.

    Most tensors are alike: the same regions of other layers and experts. So what goes where is
    found once for those, and costs a look into a table for each other one.
    """

    def __init__(
        self, held: Sequence[Mapping[str, tuple[Region, ...]]], names: Sequence[str]
    ) -> None:
        """``held``: of each rank of the trainer. ``names``: all tensors, in a common order."""
        self._names = names
        # the regions of each tensor; equal ones are one object
        shared: dict[Regions, Regions] = {}
        self._held: list[Regions] = []
        for name in names:
            found = tuple(rank.get(name, ()) for rank in held)
            self._held.append(shared.setdefault(found, found))
        self._known: dict[tuple[Region, int, int], list[Part]] = {}

    def of_tensor(self, at: int, wanted: Region, receiver: int) -> list[Part]:
        """Return who sends which part of ``wanted``, of the tensor ``names[at]``, to ``receiver``.

        Raises ``NotHeld``.
        """
        held = self._held[at]
        first = (at + receiver) % len(held)
        key = wanted, id(held), first
        if (known := self._known.get(key)) is None:
            try:
                known = self._known[key] = parts_of(wanted, held, first)
            except NotHeld as error:
                raise NotHeld(f"of {self._names[at]!r} {error}") from None
        return known
