"""Sends the served weights of one rank to other servers, beside decoding and beside updates.

An offer is of one version. As long as it lasts the rank listens, and sends to one receiver after
the other: the offering thread copies the weights (``copying.py``), computes their digest, and sends
them (``stream.py``). A piece of another version is never sent: if the version moves on, the
receiver is told so, and drops what has come.

A rank has one offer at a time, and the others wait for their answer until it is their turn. An
offer without a receiver makes way for the next one after a while: its caller may be gone. Receivers
of one offer, such as the replicas of a server, wait on their connections and are told so.

The thread looks for receivers turn by turn, each turn a job of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from sglang.srt.utils.network import get_local_ip_auto

from sglang_inflight.extensions.saves.copying import require_version
from sglang_inflight.extensions.saves.messages import Listens, OfferCall, WithdrawCall
from sglang_inflight.extensions.saves.reading import ServedWeights, readable_by_a_thread
from sglang_inflight.extensions.saves.stream import (
    FORMAT,
    Connection,
    Described,
    Head,
    Kind,
    Listener,
)
from sglang_inflight.messages import Done, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.controller import CALLS, PARTS, READERS, Controller, Handler
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.worker import StagingWorker
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest
from sglang_inflight.topology import own_replica
from sglang_inflight.vocabulary.errors import Conflict, Dropped, InflightError, Refused, describe

logger = logging.getLogger(__name__)

# longest wait for a receiver in one turn
_TURN_S = 0.1
# an offer without a receiver makes way for another one
_IDLE_S = 60.0
_MOST_OFFERS = 64


@dataclass
class _Offer:
    """One offer. The scheduler's thread writes ``given_up``, the offering thread all else."""

    call: OfferCall
    weight_version: str
    # the number ``LiveWeights.weights``, and the digest, None if it is not known
    weights: int
    digest: str | None
    # end of the wait for its turn, and then of the offer
    ends_at: float
    given_up: str | None = None
    # whether nothing is read for it any more
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.given_up is not None or time.monotonic() > self.ends_at

    def check(self) -> None:
        """Raise if the offer was given up, or is out of time."""
        if self.given_up is not None:
            raise Conflict(f"the offer was given up: {self.given_up}")
        if time.monotonic() > self.ends_at:
            raise Dropped("the offer's time ran out")


@dataclass
class _Listening:
    """The offer whose rank listens. ``used_at``: when the last receiver left, or it began."""

    offer: _Offer
    listener: Listener
    used_at: float

    @property
    def is_idle(self) -> bool:
        return time.monotonic() > self.used_at + _IDLE_S

    def check(self) -> None:
        """Raise if the offer is over. Other receivers learn that they have to wait."""
        self.offer.check()
        self.listener.tend()


class Offering:
    """Offers of one rank. Only the scheduler's thread calls it."""

    def __init__(
        self,
        served: ServedWeights,
        answers: AnswerChannel,
        layout: dict[str, str],
        make_worker: Callable[[], StagingWorker],
    ) -> None:
        """``make_worker`` starts the offering thread."""
        self._served = served
        self._answers = answers
        self._layout = layout
        self._make_worker = make_worker
        self._worker: StagingWorker | None = None
        # this belongs to the scheduler's thread
        self._offers: list[_Offer] = []
        # these belong to the offering thread. Offers wait for their turn, and one is open
        self._waiting: list[_Offer] = []
        self._listening: _Listening | None = None
        self._takes_turns = False

    # ---- calls -------------------------------------------------------------------

    def offer(self, call: OfferCall, *, current_version: str) -> None:
        """Begin to listen when it is the offer's turn. The offering thread answers then."""
        self._served.require(call.expected_version, current_version=current_version)
        if own_replica():
            # the first replica has the same weights
            self._answers.succeed(call, Listens(weight_version=current_version))
            return
        self._offers = [offer for offer in self._offers if not offer.has_ended]
        if len(self._offers) == _MOST_OFFERS:
            raise Conflict(f"{_MOST_OFFERS} offers go on already: withdraw one")
        live = self._served.live
        ends_at = time.monotonic() + call.timeout_s
        offer = _Offer(call, current_version, live.weights, live.digest, ends_at)
        self._offers.append(offer)
        if self._worker is None:
            self._worker = self._make_worker()
        self._worker.do(partial(self._add, self._worker, offer))

    def withdraw(self, call: WithdrawCall) -> None:
        for offer in self._offers:
            if offer.call.offer_id == call.offer_id:
                offer.given_up = "it was withdrawn"
        self._answers.succeed(call, Done())

    def stop(self, why: str) -> None:
        """Give up all offers. Nobody reads the weights after the return."""
        for offer in self._offers:
            offer.given_up = offer.given_up or why
        self._served.await_no_reader()

    # ---- on the offering thread ----------------------------------------------------

    def _add(self, worker: StagingWorker, offer: _Offer) -> None:
        self._waiting.append(offer)
        if not self._takes_turns:
            self._takes_turns = True
            worker.do(partial(self._take_turn, worker))

    def _take_turn(self, worker: StagingWorker) -> None:
        """Send to a receiver, if one has come. The next turn is due then, if an offer is left."""
        try:
            now = self._listening
            if now is not None and (now.offer.is_over or (self._waiting and now.is_idle)):
                now.listener.close()
                now.offer.has_ended = True
                now = self._listening = None
            for offer in [each for each in self._waiting if each.is_over]:
                self._waiting.remove(offer)
                self._listen(offer)
            if now is None and self._waiting:
                now = self._listening = self._listen(self._waiting.pop(0))
            if now is not None and (connection := now.listener.poll(_TURN_S)) is not None:
                with closing(connection):
                    self._serve(now, connection)
                now.used_at = time.monotonic()
        finally:
            self._takes_turns = bool(self._waiting) or self._listening is not None
            if self._takes_turns:
                worker.do(partial(self._take_turn, worker))

    def _listen(self, offer: _Offer) -> _Listening | None:
        """Listen, and answer the call of ``offer``. Return None if it has failed."""
        call = offer.call
        try:
            offer.check()
            # what forbids it must not wait for a receiver
            require_version(self._served.live, offer.weights)
            self._served.tensors(offer.check)
            listener = Listener(call.host or _own_address(), call.token)
        except BaseException as error:
            offer.has_ended = True
            self._answers.fail(call, error)
            return None
        offer.ends_at = time.monotonic() + call.timeout_s
        self._answers.succeed(
            call,
            Listens(
                weight_version=offer.weight_version,
                host=listener.host,
                port=listener.port,
                digest=offer.digest,
            ),
        )
        return _Listening(offer, listener, time.monotonic())

    def _serve(self, now: _Listening, connection: Connection) -> None:
        """Send to one receiver. Whatever fails ends this transfer alone, and the receiver's."""
        try:
            with AbandonableThread(now.check) as thread:
                self._send(now, connection, thread)
        except (InflightError, OSError) as error:
            logger.warning("A transfer of the served weights has failed: %s", describe(error))
            connection.tell(describe(error))
        except BaseException:
            connection.tell("the offering rank has failed: see its log")
            raise

    def _send(self, now: _Listening, connection: Connection, thread: AbandonableThread) -> None:
        offer, served, check = now.offer, self._served, now.check
        weights = offer.weights
        tensors, numbers = served.tensors(check), served.numbers(weights, check)
        head = Head(
            format=FORMAT,
            offer_id=offer.call.offer_id,
            weight_version=offer.weight_version,
            layout=self._layout,
            tensors=[Described(name, str(t.dtype), tuple(t.shape)) for name, t in tensors],
            numbers=numbers.written,
        )
        thread.begin(partial(connection.send, Kind.HEAD, msgspec.json.encode(head)))

        def send(kind: Kind, content: memoryview | bytes) -> None:
            thread.end()
            thread.begin(partial(connection.send, kind, content))

        digest, reader = Digest(), HostReader()
        for name, tensor in tensors:
            one = TensorDigest(name, tensor)
            # the next piece is copied while this one is sent
            for piece in one.read(reader, served.pieces_of(tensor, weights, check)):
                send(Kind.PIECE, piece.view(torch.uint8).numpy().data)
            send(Kind.DIGEST, one.hexdigest().encode())
            digest.add(one.line)
        for lines in numbers.described:
            digest.add(lines)
        if offer.digest not in (None, digest.hexdigest()):
            raise Conflict(
                f"the sent weights have the digest {digest.hexdigest()}, and {offer.digest} was "
                "offered"
            )
        send(Kind.END, digest.hexdigest().encode())
        thread.end()


@PARTS.join()
def make_offering(controller: Controller) -> Offering:
    served, make_worker = readable_by_a_thread(controller, "inflight-offering")
    return Offering(served, controller.answers, controller.staging_parts.layout, make_worker)


@CALLS.join()
def handlers_of_offers(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    offering = controller.part(Offering)

    def offer(call: OfferCall) -> None:
        controller.hollow.require_weights("an offer of the weights")
        offering.offer(call, current_version=controller.versions.current)

    return {OfferCall: offer, WithdrawCall: offering.withdraw}


@READERS.join()
def give_up(controller: Controller, why: str) -> None:
    controller.part(Offering).stop(why)


def _own_address() -> str:
    """Return the address of this machine, as SGLang finds it for its own connections."""
    try:
        address: str = get_local_ip_auto()
    except ValueError as error:
        raise Refused(f"this machine's address is not known: name the host ({error})") from error
    return address
