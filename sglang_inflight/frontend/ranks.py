"""Send a call to every scheduler rank and collect an answer from each."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.messages import A, Failed, InflightCall, RankAnswer, RankIsSilent
from sglang_inflight.topology import Rank, all_ranks
from sglang_inflight.vocabulary.errors import ERRORS, OutcomeUnknown, RankFailed, RankSilent

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)


class Awaited(Protocol):
    """A wait for answers of ranks."""

    def give_up(self, silent: frozenset[Rank], for_s: float) -> None:
        """Stop the wait if a ``silent`` rank's answer is missing."""


class _Collector:
    def __init__(self, expected: frozenset[Rank]) -> None:
        self.answers: dict[Rank, RankAnswer] = {}
        self.complete = asyncio.get_running_loop().create_future()
        self._expected = expected

    def add(self, answer: RankAnswer) -> None:
        self.answers[rank_of(answer)] = answer
        if not self.missing() and not self.complete.done():
            self.complete.set_result(None)

    def give_up(self, silent: frozenset[Rank], for_s: float) -> None:
        lost = silent & self.missing()
        if lost and not self.complete.done():
            self.complete.set_exception(silence_error(lost, for_s))

    def missing(self) -> frozenset[Rank]:
        return self._expected - self.answers.keys()


class Ranks:
    """All scheduler ranks of all replicas, as seen by one front-end process.

    Answers are matched to calls by id, so the late answer of an abandoned call is dropped and
    never mistaken for the next call's. Lives on the front end's event loop.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, lifetime: Lifetime) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._lifetime = lifetime
        # Read at construction: SGLang keeps the sizes in a process global, which the next
        # Engine of this process overwrites.
        self.all = all_ranks()
        self._collectors: dict[str, _Collector] = {}
        # waits to end when a rank falls silent
        self._awaited: list[Awaited] = []
        # silent ranks on other nodes: seconds of silence when reported
        self._silent: dict[Rank, float] = {}

    async def call(self, call: InflightCall[A], timeout_s: float) -> list[A]:
        """Send ``call`` and return every rank's answer, in rank order.

        Raises a failed rank's error, ``RankSilent`` with the silent ranks' names after
        ``timeout_s`` seconds, ``Gone`` if the ranks have ended, and ``OutcomeUnknown`` if the
        ranks end during the call.
        """
        return require_success(await self.ask(call, timeout_s))

    async def ask(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        """Do as ``call``, but return failures as answers."""
        self._lifetime.require()
        self._tokenizer_manager.auto_create_handle_loop()
        call.call_id = uuid.uuid4().hex
        collector = self._collectors[call.call_id] = _Collector(self.all)
        try:
            await self._tokenizer_manager._async_dispatch_to_scheduler(call)
            try:
                with self.given_up_on_silence(collector):
                    await self._lifetime.unless_shut_down(
                        asyncio.wait_for(collector.complete, timeout_s)
                    )
            except TimeoutError:
                silent = _name(sorted(collector.missing()))
                raise RankSilent(f"{silent} did not answer within {timeout_s:g} s") from None
        finally:
            del self._collectors[call.call_id]
        return [_as_answer_to(call, collector.answers[rank]) for rank in sorted(self.all)]

    async def carry_out(self, call: InflightCall[A], timeout_s: float) -> list[A]:
        """``call`` an irrevocable step; see ``ask_to_carry_out``."""
        return require_success(await self.ask_to_carry_out(call, timeout_s))

    async def ask_to_carry_out(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        """``ask`` for an irrevocable step: a silent rank does the step later, or is dead.

        Raises ``OutcomeUnknown`` if a rank is silent.
        """
        try:
            return await self.ask(call, timeout_s)
        except RankSilent as silence:
            raise unknown_outcome(silence) from silence

    @property
    def count(self) -> int:
        """Number of ranks of all replicas: a weight-update group's world size less the trainer."""
        return len(self.all)

    def take_answer(self, answer: RankAnswer) -> None:
        collector = self._collectors.get(answer.call_id)
        if collector is not None:
            collector.add(answer)

    def take_silence(self, said: RankIsSilent) -> None:
        """End every wait for a rank whose node is dead, stopped or cut off.

        Calls are still sent to silent ranks: a returning rank carries them out.
        """
        rank = rank_of(said)
        if said.for_s is None:
            self._silent.pop(rank, None)
            logger.warning("%s, on another node, is heard of again.", rank)
            return
        self._silent[rank] = said.for_s
        logger.error(
            "Nothing was heard of %s, on another node, for %g s: it is dead, stopped or cut off, "
            "and this server cannot go on without it.",
            rank,
            said.for_s,
        )
        for awaited in self._awaited:
            self._give_up(awaited)

    @contextmanager
    def given_up_on_silence(self, awaited: Awaited) -> Iterator[None]:
        """End the block's wait if a rank falls silent."""
        self._awaited.append(awaited)
        self._give_up(awaited)
        try:
            yield
        finally:
            self._awaited.remove(awaited)

    def _give_up(self, awaited: Awaited) -> None:
        if self._silent:
            awaited.give_up(frozenset(self._silent), min(self._silent.values()))


def silence_error(lost: Iterable[Rank], for_s: float) -> RankSilent:
    ranks = _name(sorted(lost))
    return RankSilent(f"nothing was heard of {ranks}, on another node, for {for_s:g} s")


def unknown_outcome(silence: RankSilent) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the call was sent to all ranks, but {silence}. A silent rank is dead, or carries the "
        "call out later"
    )


def require_success(answers: list[A | Failed]) -> list[A]:
    """Return the answers; raise the first failure's error with every failed rank's message."""
    failed = [answer for answer in answers if isinstance(answer, Failed)]
    if not failed:
        return [answer for answer in answers if not isinstance(answer, Failed)]
    error = ERRORS.get(failed[0].error, RankFailed)
    if len({answer.message for answer in failed}) == 1 and len(failed) == len(answers):
        raise error(failed[0].message)
    raise error(describe_failures(failed))


def describe_failures(failed: list[Failed]) -> str:
    """Return each failed rank's name and message."""
    return "; ".join(f"{rank_of(a)}: {a.message}" for a in failed)


def _as_answer_to(call: InflightCall[A], answer: RankAnswer) -> A | Failed:
    # AnswerChannel sends no other type
    assert isinstance(answer, call.answer | Failed)
    return answer


def _name(ranks: Iterable[Rank]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def rank_of(answer: RankAnswer) -> Rank:
    """Return the answer's sender."""
    return Rank(answer.dp_rank, answer.pp_rank, answer.tp_rank)
