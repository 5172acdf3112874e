"""Compares a rollout with its repetition, and log probabilities by version."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_inflight.client.spans import names_by_token
from sglang_inflight.extensions.replay.play import Played
from sglang_inflight.extensions.replay.rollout import Event, Rollout


class Difference(NamedTuple):
    """Where two lists of log probabilities differ most."""

    token: int
    nats: float


@dataclass(frozen=True)
class Verdict:
    """How a repetition compares. ``first`` is the first token that differs, or None."""

    name: str
    tokens: int
    commits: int
    retractions: int
    first: int | None
    # None if the answer has no log probabilities
    largest: Difference | None
    # first token whose log probability differs by more than the tolerance
    first_apart: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.first is None and self.first_apart is None and not self.notes

    @property
    def is_exact(self) -> bool:
        return self.is_equal and self.largest is not None and self.largest.nats == 0

    def __str__(self) -> str:
        if self.first is not None:
            said = f"differs at token {self.first}"
        elif self.first_apart is not None:
            said = f"the log probability differs at token {self.first_apart}"
        elif self.notes:
            said = "differs"
        elif self.largest is None:
            said = "equal; the answer has no log probabilities"
        elif self.is_exact:
            said = "equal, bit for bit"
        else:
            said = "equal"
        if self.largest is not None and self.largest.nats:
            said += f"; at most {self.largest.nats:.2g} nats apart (token {self.largest.token})"
        return "; ".join((said, *self.notes))


def compare(rollout: Rollout, played: Played, forced: Played | None, tolerance: float) -> Verdict:
    """Compare ``rollout`` with ``played``.

    ``forced`` has the rollout's own tokens, where ``played`` has others. Log probabilities are
    equal within ``tolerance`` nats.
    """
    first = first_difference(rollout.tokens, played.tokens)
    same = played if first is None else forced
    largest, apart = None, None
    if rollout.logprobs is not None and same is not None:
        nats = [abs(a - b) for a, b in zip(rollout.logprobs, same.logprobs, strict=False)]
        largest = Difference(*max(enumerate(nats), key=lambda each: each[1], default=(0, 0.0)))
        apart = next((token for token, far in enumerate(nats) if not far <= tolerance), None)
    notes = [*played.notes]
    if first is None:
        notes += differences(rollout, played)
    return Verdict(
        rollout.name,
        len(rollout.tokens),
        rollout.commits,
        rollout.retractions,
        first,
        largest,
        apart,
        notes,
    )


def first_difference(theirs: Sequence[object], ours: Sequence[object]) -> int | None:
    """Return the first index at which two lists differ, or None."""
    missing = object()
    pairs = itertools.zip_longest(theirs, ours, fillvalue=missing)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def differences(rollout: Rollout, played: Played) -> list[str]:
    """Return what else than tokens was not as recorded, in sentences."""
    found = []
    for what, theirs, ours in (
        ("token", rollout.made_by, played.made_by),
        ("the KV of position", rollout.kv, played.kv),
    ):
        named, here = names_by_token(theirs), names_by_token(ours)
        if (at := first_difference(named, here)) is not None:
            found.append(f"{what} {at} was made by {_at(named, at)}, and by {_at(here, at)} here")
    found += [
        f"{name} differ" for name, rows in rollout.rows.items() if rows != played.rows.get(name)
    ]
    theirs_, ours_ = _without_epochs(rollout.record.events), _without_epochs(played.events)
    if not found and (at := first_difference(theirs_, ours_)) is not None:
        found.append(f"event {at} was {_at(theirs_, at)}, and {_at(ours_, at)} here")
    return found


def _at(values: Sequence[object], at: int) -> str:
    return repr(values[at]) if at < len(values) else "nothing"


def _without_epochs(events: Sequence[Event]) -> list[Event]:
    return [event[:2] if event[0] != "prefill" else event for event in events]


class Mismatch(NamedTuple):
    """How far two computations of log probabilities are apart, over tokens of one version."""

    version: str
    tokens: int
    mean: float
    largest: float
    # variance of the importance ratios exp(second - first)
    ratio_variance: float


def mismatch(
    versions: Sequence[str], first: Sequence[float], second: Sequence[float]
) -> list[Mismatch]:
    """Return the mismatch of each version, in the order in which the versions come.

    ``versions`` names each token's version.
    """
    found = []
    for version in dict.fromkeys(versions):
        pairs = [(a, b) for of, a, b in zip(versions, first, second, strict=True) if of == version]
        nats = [abs(b - a) for a, b in pairs]
        ratios = [math.exp(min(b - a, 50.0)) for a, b in pairs]
        mean_ratio = sum(ratios) / len(ratios)
        variance = sum((ratio - mean_ratio) ** 2 for ratio in ratios) / len(ratios)
        found.append(Mismatch(version, len(pairs), sum(nats) / len(nats), max(nats), variance))
    return found
