"""Finds a fleet's version, the servers that are behind it, and those that can help them.

A server's own epoch and its ranks' digests say what it serves. Servers of one layout hold the same
bytes for the same weights, so their digests are compared; others are compared by the version's
name alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sglang_inflight.vocabulary.answers import Answer, Receipt, Role, Status
from sglang_inflight.vocabulary.errors import Conflict

# each rank's position and digest, None if the rank has none
RankDigests = tuple[tuple[int, int, str | None], ...]

_SHOWN_DIGITS = 8


class VersionUnclear(Conflict):
    """No version is served by more than half of the servers. Name the fleet's version."""


class Row(Answer, frozen=True, kw_only=True):
    """One server of a fleet. All but ``url``, ``ready`` and ``why`` are None if it is silent."""

    url: str
    ready: bool
    # why the server is not ready, or gave no answer
    why: str | None = None
    role: Role | None = None
    # the status' word: running, draining, frozen
    state: str | None = None
    weight_version: str | None = None
    epoch: int | None = None
    # the first rank's
    digest: str | None = None
    # whether it serves another version than the fleet; None if the fleet's is unclear
    behind: bool | None = None


class FleetTable(Answer, frozen=True, kw_only=True):
    """The versions of all servers. ``weight_version`` is the fleet's; None if it is unclear."""

    weight_version: str | None
    why_unclear: str | None = None
    rows: tuple[Row, ...]


class CaughtUp(Answer, frozen=True, kw_only=True):
    """A server serves the fleet's version. ``receipt``: of its update, None if it needed none."""

    weight_version: str
    digest: str | None
    # the server that saved its weights for this one
    peer: str | None = None
    receipt: Receipt | None = None


class FleetsVersion(NamedTuple):
    """``digests``: those of the version's ranks, by layout."""

    weight_version: str
    digests: dict[str, RankDigests]

    def is_served_by(self, status: Status) -> bool:
        """Return whether the server has the version. An unknown digest proves nothing."""
        if why_not_served(status) is not None or status.weight_version != self.weight_version:
            return False
        known = self.digests.get(status.layout)
        return known is None or _are_unknown(known) or digests_of_ranks(status) == known

    def first_digest(self, layout: str) -> str | None:
        """Return the first rank's digest, None if it is not known."""
        known = self.digests.get(layout)
        return known[0][2] if known else None


def find_version(found: Mapping[str, Status], wanted: str | None = None) -> FleetsVersion:
    """Return the version ``wanted``, or the one of more than half of the updated servers.

    A server without a commit since its start has no vote beside one with a commit. Raises
    ``VersionUnclear`` without such a version, or if servers of one layout hold different weights
    under its name, and none more than half of them.
    """
    whole = {url: status for url, status in found.items() if why_not_served(status) is None}
    voters = [s for s in whole.values() if s.epoch] or list(whole.values())
    if wanted is None:
        wanted = _majority(status.weight_version for status in voters)
    if wanted is None:
        raise VersionUnclear(
            f"no version is served by more than half of the servers: {describe(found)}. Name the "
            "fleet's version"
        )
    digests: dict[str, RankDigests] = {}
    named = [status for status in voters if status.weight_version == wanted]
    named = named or [status for status in whole.values() if status.weight_version == wanted]
    if not named:
        raise VersionUnclear(f"no server serves {wanted!r}: {describe(found)}")
    for layout in {status.layout for status in named}:
        held = [digests_of_ranks(status) for status in named if status.layout == layout]
        most = _majority(held)
        if most is None:
            raise VersionUnclear(
                f"{wanted!r} is the name of different weights: {describe(found)}. Roll servers "
                "back, or update all of them"
            )
        digests[layout] = most
    return FleetsVersion(wanted, digests)


def why_not_served(status: Status) -> str | None:
    """Return why the server serves no whole version, or None if it does."""
    reasons = (
        why for rank in status.ranks for why in (rank.memory.hollow, rank.staging.dirty) if why
    )
    return next(reasons, None)


def digests_of_ranks(status: Status) -> RankDigests:
    """Return the digests of one replica's ranks."""
    found = {(rank.pp_rank, rank.tp_rank, rank.digest) for rank in status.ranks}
    return tuple(sorted(found, key=lambda rank: (rank[0], rank[1], rank[2] or "")))


def peers_of(found: Mapping[str, Status], version: FleetsVersion, layout: str) -> list[str]:
    """Return the servers that can save ``version`` for others of ``layout``, the idlest first."""
    able = [
        url
        for url, status in found.items()
        if status.layout == layout
        and version.is_served_by(status)
        and status.staging.refusal is None
    ]
    return sorted(able, key=lambda url: (found[url].behind is not None, found[url].running))


def describe(found: Mapping[str, Status]) -> str:
    """Return each server's version, its epoch and the beginning of its digest."""
    return ", ".join(
        f"{url}: {status.weight_version!r} (epoch {status.epoch}, "
        f"{(status.digest or 'no digest')[:_SHOWN_DIGITS]})"
        for url, status in sorted(found.items())
    )


def make_table(
    urls: Iterable[str],
    found: Mapping[str, Status],
    why_not_ready: Mapping[str, str | None],
    wanted: str | None,
) -> FleetTable:
    """Return the fleet's table. ``why_not_ready`` has every URL: None for a ready server."""
    version, unclear = None, None
    try:
        version = find_version(found, wanted) if found else None
    except VersionUnclear as error:
        unclear = f"{error}"
    return FleetTable(
        weight_version=version.weight_version if version is not None else None,
        why_unclear=unclear,
        rows=tuple(_row(url, found.get(url), why_not_ready[url], version) for url in urls),
    )


def _row(url: str, status: Status | None, why: str | None, version: FleetsVersion | None) -> Row:
    given: dict[str, Any] = {"url": url, "ready": why is None, "why": why}
    if status is not None:
        given |= {
            "role": status.role,
            "state": status.state,
            "weight_version": status.weight_version,
            "epoch": status.epoch,
            "digest": status.digest,
            "behind": None if version is None else not version.is_served_by(status),
        }
    return Row(**given)


def _are_unknown(digests: RankDigests) -> bool:
    return any(digest is None for _, _, digest in digests)


def _majority(votes: Iterable[Any]) -> Any:
    """Return what more than half of ``votes`` say, or None."""
    counts = Counter(votes)
    for vote, count in counts.items():
        if 2 * count > counts.total():
            return vote
    return None
