"""The version of the server's fleet, as the server was told.

A server that joins or restarts serves another version than its fleet. It cannot know that by
itself. Told so, it is not ready and takes no new requests, until a commit brings the fleet's
version or the expectation ends. Requests that run go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.frontend.frontend import ANSWERS, BEHIND, FRONT_PARTS, HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.rank_versions import RankVersions
from sglang_inflight.frontend.ranks import rank_of
from sglang_inflight.messages import Committed, Described, RankAnswer
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.answers import Expected
from sglang_inflight.vocabulary.bodies import ExpectBody
from sglang_inflight.vocabulary.errors import Conflict

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


class FleetVersion:
    """Compares what is served with what the fleet serves. Lives on the front end's event loop."""

    def __init__(self, versions: RankVersions, pauses: Pauses, first: Rank) -> None:
        """``first`` is the rank whose digest stands for the server, as in the status."""
        self._versions = versions
        self._pauses = pauses
        self._first = first
        self._digest: str | None = None
        self._expected: ExpectBody | None = None
        # None if the server is not behind; set by the owner's state in a tokenizer worker
        self.why_behind: str | None = None

    async def expect(self, body: ExpectBody) -> Expected:
        """Note the fleet's version. The expectation ends as soon as every rank serves it.

        Raises ``Conflict`` if the caller has seen an earlier epoch: the fleet may have moved on.
        """
        # the ranks' answers are taken in here, and after them nothing is awaited
        await self._pauses.ask_status()
        if body.epoch not in (None, self._versions.first.epoch):
            raise Conflict(
                f"epoch is {body.epoch}, but epoch {self._versions.first.epoch} is serving: the "
                "server has changed its weights since"
            )
        self._expected = body if body.weight_version is not None else None
        self._compare()
        if body.weight_version is None:
            message = "Nothing is expected."
        else:
            message = self.why_behind or f"Version {body.weight_version!r} is served."
        return Expected(
            message=message,
            weight_version=self._versions.first.version,
            behind=self.why_behind,
        )

    def take_answer(self, answer: RankAnswer) -> None:
        """Take a rank's answer, after ``RankVersions`` did."""
        digest: str | None
        match answer:
            case Committed():
                digest = answer.digest
            case Described(weights=weights):
                digest = weights.digest
            case _:
                return
        if rank_of(answer) == self._first:
            self._digest = digest
        self._compare()

    def _compare(self) -> None:
        if self._expected is None:
            self.why_behind = None
            return
        wanted, digest = self._expected.weight_version, self._expected.digest
        others = [label.version for label in self._versions.labels if label.version != wanted]
        if others:
            why = f"the fleet serves version {wanted!r}, and this server serves {others[0]!r}"
        elif digest not in (None, self._digest):
            why = (
                f"the fleet serves {wanted!r} with the digest {digest}, and this server serves it "
                f"with {self._digest or 'an unknown one'}"
            )
        else:
            # the next version of a trainer's is no other one than expected
            self._expected = self.why_behind = None
            return
        self.why_behind = why


@FRONT_PARTS.join()
def make_fleet_version(frontend: Frontend, _: TokenizerManager) -> FleetVersion:
    return FleetVersion(frontend.versions, frontend.pauses, min(frontend.ranks.all))


@HANDLERS.join()
def add_handler(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    return handlers.with_more({"expect_version": frontend.part(FleetVersion).expect})


@ANSWERS.join()
def take_answer(frontend: Frontend, answer: RankAnswer) -> None:
    frontend.part(FleetVersion).take_answer(answer)


@BEHIND.join()
def why_behind(frontend: Frontend) -> str | None:
    return frontend.part(FleetVersion).why_behind
