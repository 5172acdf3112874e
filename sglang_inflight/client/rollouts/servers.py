"""Chooses the server of a rollout: by readiness, version, cached prefix and load."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

import httpx

from sglang_inflight.client.aio import together
from sglang_inflight.client.async_client import AsyncClient
from sglang_inflight.vocabulary.answers import Status
from sglang_inflight.vocabulary.errors import InflightError

# seconds between two looks at the servers
LOOK_S = 0.5
_ANSWER_S = 2.0
# longer than a step, for an answer that decides about a rollout
LONG_ANSWER_S = 150.0
# tokens of a block, by which prefixes are compared
_BLOCK = 64
_MOST_BLOCKS = 4096
# a cached prefix is worth this many requests more than the least loaded server has
_WORTH = 4


class Place:
    """One server, as it was seen last. Belongs to the event loop of its rollouts."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.url = client.url
        self.status: Status | None = None
        # why it takes no request; None if it takes them
        self.why_not: str | None = None
        # this client's own requests there
        self.requests = 0

    async def look(self, patience_s: float = _ANSWER_S) -> None:
        """Ask the server. A server in a long step answers late, and stays as it was seen last."""
        try:
            self.status = await asyncio.wait_for(self.client.status(), patience_s)
        except TimeoutError:
            if self.status is None:
                self.why_not = f"it did not answer in {patience_s:g} s"
            return
        except (InflightError, httpx.HTTPError) as error:
            self.status, self.why_not = None, str(error) or type(error).__name__
            return
        status = self.status
        rejects = "it rejects new requests" if status.new_requests == "reject" else None
        self.why_not = status.draining or status.behind or status.memory.hollow or rejects

    @property
    def is_leaving(self) -> bool:
        """Whether the server drains, or does not answer."""
        return self.status is None or self.status.draining is not None

    @property
    def instance(self) -> str | None:
        """The name of the server's process that was seen last, or None without an answer."""
        return None if self.status is None else self.status.instance

    def serves(self, versions: Collection[str]) -> bool:
        return self.status is not None and self.status.weight_version in versions


class Servers:
    """The servers of one fleet's rollouts."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self.places = {client.url: Place(client) for client in clients}
        self._prefixes: OrderedDict[bytes, str] = OrderedDict()
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def look(self, not_before: float | None = None) -> None:
        """Ask all servers, unless the last look began at ``not_before`` or later.

        ``not_before`` is a time of ``time.monotonic``, by default ``LOOK_S`` seconds ago.
        """
        if not_before is None:
            not_before = time.monotonic() - LOOK_S
        async with self._looking:
            if self._looked_at >= not_before:
                return
            begun_at = time.monotonic()
            await together(place.look() for place in self.places.values())
            self._looked_at = begun_at

    async def find(
        self,
        tokens: Sequence[int] | None,
        wanted: Collection[str],
        without: Collection[str],
    ) -> Place | None:
        """Choose a server that serves one of the ``wanted`` versions now, or any other one."""
        await self.look()
        place = self.choose(tokens, wanted, without)
        if place is not None and wanted and not place.serves(wanted):
            # a server may have come to the version since
            await self.look(time.monotonic())
            place = self.choose(tokens, wanted, without)
        return place

    def ready(self) -> set[str]:
        """Return the servers that take requests, as far as is known."""
        return {url for url, place in self.places.items() if place.why_not is None}

    def choose(
        self,
        tokens: Sequence[int] | None,
        wanted: Collection[str],
        without: Collection[str],
    ) -> Place | None:
        """Return the best server that is ready, ``without`` some, or None.

        ``wanted``: versions, one of which it should serve. ``tokens``: the prompt, if known.
        """
        free = [
            place
            for url, place in self.places.items()
            if url not in without and place.why_not is None
        ]
        if not free:
            return None
        if wanted:
            free = [place for place in free if place.serves(wanted)] or free
        hashes = _blocks(tokens or ())
        cached = self._with_prefix(hashes)
        least = min(place.requests for place in free)
        best = next(
            (p for p in free if p.url == cached and p.requests <= least + _WORTH),
            min(free, key=lambda place: place.requests),
        )
        self._remember(hashes, best.url)
        return best

    def _with_prefix(self, hashes: Sequence[bytes]) -> str | None:
        """Return the server that had the longest of these prefixes last."""
        return next((self._prefixes[h] for h in reversed(hashes) if h in self._prefixes), None)

    def _remember(self, hashes: Sequence[bytes], url: str) -> None:
        for each in hashes:
            self._prefixes[each] = url
            self._prefixes.move_to_end(each)
        while len(self._prefixes) > _MOST_BLOCKS:
            self._prefixes.popitem(last=False)


def _blocks(tokens: Sequence[int]) -> list[bytes]:
    """Return digests of the prefixes that end at a block's end."""
    digest, found = hashlib.sha256(), []
    for begin in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        digest.update(array("q", tokens[begin : begin + _BLOCK]).tobytes())
        found.append(digest.digest()[:16])
    return found
