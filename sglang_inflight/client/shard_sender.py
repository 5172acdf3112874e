"""Sends the shards of a trainer's ranks straight to the ranks of servers that use them."""

from __future__ import annotations

import base64
import functools
import logging
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, Unpack

import msgspec

from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.async_fleet import AsyncFleet
from sglang_inflight.client.base import Base, NotFromBase, digests_of
from sglang_inflight.client.changes import Change
from sglang_inflight.client.fields import SessionFields
from sglang_inflight.client.report import FleetRefused, FleetSplit
from sglang_inflight.client.sender import (
    REASON_S,
    GroupFailed,
    Receipt_co,
    Target,
    raise_failures,
    receipts_of,
    servers_of,
)
from sglang_inflight.client.shard_changes import Followed, Kinds, cut_changes, rows_of
from sglang_inflight.client.shard_parts import Own, Shard, pack, shard_of
from sglang_inflight.client.shard_sending import Calls, Sending
from sglang_inflight.client.trainer_group import Backend, TrainerGroup, choose_backend
from sglang_inflight.client.trainer_ranks import TrainerRanks
from sglang_inflight.mooncake import mooncake_at
from sglang_inflight.vocabulary.bodies import SPARSE
from sglang_inflight.vocabulary.chains import chains_of
from sglang_inflight.vocabulary.errors import HalfDone, RankFailed, Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import FORMAT, Bucket, Counts, Dealing
from sglang_inflight.vocabulary.shards import Held, Shards, read_shards

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

logger = logging.getLogger(__name__)

GROUP_NAME = "inflight_shards"
BUCKET_BYTES = 16 << 20
# pause between looks at a group that forms
MEET_POLL_S = 0.05
AGAIN, COMMITTED = "again", "committed"
_OF_RANKS = (Refused, RankFailed)
T = TypeVar("T")


class Told(NamedTuple):
    """Rank 0 tells the other ranks of the trainer this before it sends a version."""

    # what each rank of the servers uses, in the group's order
    wanted: Sequence[str]
    # lines of the digests that the ranks may not know
    lines: Mapping[str, bytes]
    # a tag for the version, and that of the version since which changes are sent; None: it is whole
    tag: str
    since: str | None


class LastSent(NamedTuple):
    """The version that the servers serve, as far as rank 0 knows: the base of the next changes.

    Each element that changes comes from the rank that has sent it before, because nothing of
    ``held`` and ``wanted`` has changed since.
    """

    base: Base
    tag: str
    held: Sequence[str]
    wanted: Sequence[str]


class ShardSender(Generic[Receipt_co]):
    """Sends a sharded trainer's weights to a server, or to all servers of a fleet.

        # on every rank of the trainer
        with ShardSender(Client(url) if rank == 0 else None) as sender:
            for step in …:
                sender.send(model.named_parameters(), weight_version=f"{step}")

    Every rank of the trainer has a sender, and calls each method at the same time as the others.
    Rank 0 alone has a client. A tensor is a ``DTensor``, a ``Shard``, or a whole tensor that every
    rank has. No rank gathers: each sends its part of a tensor to the ranks of the servers that use
    it, and to no others. Of replicas, one rank sends.

    Each ``send`` is a session: what comes is staged while the servers generate, and goes live
    together at its end. The trainer must not change its weights until ``send`` returns. If it
    raises, it raises on every rank, and after ``Refused`` nothing has changed.

    The ranks of trainer and servers are one process group. What goes between two of them is derived
    by both, from what the trainer's ranks have and what the servers' ranks use. So a failure breaks
    the group, and the next ``send`` joins anew.

    With ``sparse`` each rank keeps a copy of what it has sent last in its machine's memory, and
    sends the elements that have changed. A tensor comes whole if its changes are larger on one
    rank, and where ``Sender`` sends it whole. So does the whole version, and if its tensors or
    their shards are others than before, or the servers' ranks use others.
    """

    def __init__(
        self,
        client: Target[Receipt_co] | None,
        *,
        ranks: dist.ProcessGroup | None = None,
        group_name: str = GROUP_NAME,
        backend: Backend | None = None,
        master_address: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        mooncake: bool = False,
        dtype: torch.dtype | None = None,
        relays: bool = True,
        leave_out_dead: bool = False,
        timeout_s: float = TIMEOUT_S,
        sparse: bool = False,
    ) -> None:
        """Create a sender. ``client``: on rank 0 alone.

        ``ranks`` is the trainer's own group, by default that of all its processes: its ranks agree
        in it. ``master_address`` is rank 0's machine for all others, by default its address on the
        way to the first server. A bucket takes ``bucket_bytes`` here and on a server's rank, and
        each rank has one under way for each chain.

        With ``mooncake`` the bytes go by Mooncake's TransferEngine, by RDMA where there is a card
        for it, and the group is gloo's.

        Floats are sent as ``dtype``, by default each in its own. With ``relays``, ranks of servers
        that use the same parts form a chain: the first receives them, and each hands them on to the
        next. Without, the trainer sends them to each.

        With ``leave_out_dead`` a server that does not answer is left out of the fleet
        (``AsyncFleet.leave_out``), and the version is sent again to the others.

        ``sparse`` sends changed elements: each rank needs memory for a copy of its shards, and for
        all changes of a version.

        The rest is as in ``Sender``. All ranks give the same values.
        """
        self._client = client
        self._ranks = TrainerRanks(ranks)
        self._rank, self._trainers = self._ranks.own, self._ranks.count
        if (client is None) == (self._rank == 0):
            raise ValueError("rank 0 of the trainer has a client, and no other rank has one")
        self._is_fleet = client is not None and isinstance(client.client, AsyncFleet)
        if leave_out_dead and not (client is None or self._is_fleet):
            raise ValueError("leave_out_dead needs a fleet")
        # servers in the group, or to be in it
        self._servers: Sequence[AsyncClient] = ()
        self._group_name = group_name
        self._backend = choose_backend("gloo" if mooncake else backend)
        self._mooncake = mooncake
        # this machine's address for the ranks of the servers
        self._address = ""
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._relays = relays
        self._leave_out_dead = leave_out_dead
        self._own = Own(dtype)
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None
        # servers in the group, on rank 0
        self._joined: list[AsyncClient] = []
        # what the trainer's ranks have, and what the servers' ranks use
        self._held: list[str] = []
        self._dealing: Dealing | None = None
        self._known: dict[str, Mapping[str, Held]] = {}
        # what this rank sends to each receiver, and what those use
        self._derived: tuple[Sequence[str], dict[int, list[Bucket]]] | None = None
        # None without ``sparse``
        self._followed = Followed() if sparse else None
        # names of the tensors that servers take whole alone, as far as they have said
        self._whole_alone: set[str] = set()
        # on rank 0; None: the servers serve something else, as far as we know
        self._last_sent: LastSent | None = None
        self._takes_changes = True
        # whether the last try has sent changes, and why servers have refused them, on rank 0
        self._sends_changes = False
        self._why_refused: str | None = None
        self._lines: dict[str, bytes] = {}
        self._are_lines_known = False
        # ranks of each server, on rank 0
        self._of_server: Sequence[int] = ()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def join(self) -> None:
        """Form the group if there is none. ``send`` calls this by itself. Raises as ``Sender``.

        A group of other servers than those that take part in the fleet now is left before.
        """
        if all(self._ranks.gather(self._is_joined())):
            return
        self.leave()
        self._held, self._are_lines_known = [], False
        try:
            told = self._ranks.tell(None if self._client is None else self._listen)
            self._ranks.together(lambda: self._join(*told))
        except BaseException:
            self.leave()
            raise
        self._takes_changes = True
        self._whole_alone.clear()

    def leave(self) -> None:
        """Leave the group on both sides. Ranks need not call it together."""
        group, self._group = self._group, None
        joined, self._joined = self._joined, []
        if group is None:
            return
        calls = [self._start(server.leave_group, self._group_name) for server in joined]
        try:
            wait(calls, timeout=REASON_S)
        finally:
            group.leave()

    def send(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | Shard]],
        *,
        weight_version: str | None = None,
        partial: bool = False,
        **fields: Unpack[SessionFields],
    ) -> Receipt_co | None:
        """Send weights, commit them, and return the receipt, or a fleet's report, on rank 0.

        ``named_tensors``: those that this rank has a part of. Fields are those of ``Sender.send``.
        """
        shards = self._ranks.together(lambda: dict(map(shard_of, named_tensors)))
        self._sends_changes, self._why_refused = False, None
        while True:
            try:
                self.join()
                self._agree(shards)
                return self._send(shards, weight_version=weight_version, partial=partial, **fields)
            except BaseException as error:
                self.leave()
                outcome = self._outcome_after(error)
                if outcome is None:
                    raise
                if outcome == COMMITTED:
                    # a fleet's own report, without those that were left out
                    found: Any = error.report if isinstance(error, FleetSplit) else None
                    return found

    def _outcome_after(self, error: BaseException) -> str | None:
        """Decide what follows a failure.

        Returns whether the version is to be sent ``AGAIN``: whole, if the servers refuse changes,
        or to the others, without those that do not answer. Returns ``COMMITTED`` if all others have
        committed it, and None if the failure has another cause.
        """
        if not self._leave_out_dead and self._followed is None:
            return None
        decide = functools.partial(self._decide, error)
        try:
            return self._ranks.tell(None if self._client is None else decide)
        except RuntimeError:
            # a rank of the trainer is gone, and the caller raises what it has
            return None

    def _decide(self, error: BaseException) -> str | None:
        sent_changes, self._sends_changes = self._sends_changes, False
        if sent_changes and _is_refused(error):
            self._why_refused = f"{error}"
            return AGAIN
        if not self._leave_out_dead:
            return None
        outcome = self._leave_out(error)
        if outcome is not None:
            logger.warning("Servers that do not answer were left out: %s", error)
        return outcome

    def _leave_out(self, error: BaseException) -> str | None:
        if not isinstance(error, Exception):
            # an interruption: the other ranks hear that this is the end
            return None
        assert self._client is not None
        fleet = self._client.client
        assert isinstance(fleet, AsyncFleet)
        found = self._start(fleet.status).result()
        dead = found.failures.keys() - fleet.left_out
        if not dead or not found.answers.keys() - fleet.left_out:
            return None
        fleet.leave_out(dead)
        if not isinstance(error, HalfDone):
            return AGAIN
        is_whole = isinstance(error, FleetSplit) and error.report.failures.keys() <= dead
        return COMMITTED if is_whole else None

    # ---- what goes where -------------------------------------------------------------

    def _agree(self, shards: Mapping[str, Shard]) -> None:
        """Find what all ranks of the trainer have, if it has changed."""
        own = self._own.lines_of(shards)
        digests = self._ranks.gather(own.digest)
        if digests == self._held:
            return
        # a digest stands for its lines, so ranks with equal shards say them once
        lines = self._ranks.gather(None if own.digest in digests[: self._rank] else own.lines)
        self._lines = {d: found for d, found in zip(digests, lines, strict=True) if found}

        def deal() -> Dealing:
            return Dealing([read_shards(Shards(d, self._lines[d])) for d in digests])

        self._dealing = self._ranks.together(deal)
        self._held, self._are_lines_known, self._derived = digests, False, None

    def _ask(self, since: str | None) -> Told:
        """Ask the servers what their ranks use."""
        known = sorted(self._known)
        calls = [self._start(server.plan, known=known) for server in self._servers]
        ranks = [rank for call in calls for rank in call.result()["ranks"]]
        lines = {
            rank["digest"]: msgspec.convert(rank["lines"], bytes)
            for rank in ranks
            if rank["lines"] is not None
        }
        return Told([rank["digest"] for rank in ranks], lines, uuid.uuid4().hex, since)

    def _require_last_sent(self, last: LastSent, told: Told) -> None:
        """Raise ``NotFromBase`` unless the servers serve what was sent last, cut as it is now.

        Call it within the session: nobody else commits until its end.
        """
        if last.held != self._held or last.wanted != told.wanted:
            raise NotFromBase("the tensors are others than before, or are cut in another way")
        calls = {server.url: self._start(server.status) for server in self._servers}
        last.base.require_served(digests_of({url: call.result() for url, call in calls.items()}))

    # ---- a version -------------------------------------------------------------------

    def _send(
        self, shards: Mapping[str, Shard], *, partial: bool, **fields: Any
    ) -> Receipt_co | None:
        if self._client is None:
            self._deal_out(shards, self._ranks.tell(None), partial=partial)
            # the outcome of the session
            self._ranks.tell(None)
            return None
        # nothing is known of the servers until a receipt comes
        last, self._last_sent = self._last_sent, None
        selector = fields.get("selector")
        if last is not None and self._takes_changes and last.base.fits(partial, selector):
            try:
                return self._in_session(shards, last, partial=partial, **fields)
            except NotFromBase as error:
                logger.info("A whole version is sent: %s", error)
        receipt = self._in_session(shards, None, partial=partial, **fields)
        if self._why_refused is not None:
            why, self._why_refused = self._why_refused, None
            logger.warning("Whole versions are sent, because changes were refused: %s", why)
            self._takes_changes = False
        return receipt

    def _in_session(
        self, shards: Mapping[str, Shard], last: LastSent | None, *, partial: bool, **fields: Any
    ) -> Receipt_co:
        """Send a version from rank 0: the changes since ``last``, or all of it.

        Raises ``NotFromBase`` if that is not served, before another rank of the trainer hears of
        the version.
        """
        assert self._client is not None
        self._sends_changes = False
        # others wait for a word of rank 0, for that of ``_ask`` and then for the outcome
        is_owed = True
        is_part = partial or last is not None
        try:
            with self._client.session(partial=is_part, **fields) as receipt:
                told = self._ask(None if last is None else last.tag)
                if last is not None:
                    self._require_last_sent(last, told)
                    self._sends_changes = True
                self._ranks.tell(lambda: told)
                is_owed = False
                self._deal_out(shards, told, partial=partial)
                is_owed = True
        except NotFromBase:
            raise
        except BaseException as error:
            if is_owed:
                self._ranks.say(error)
            raise
        self._ranks.tell(lambda: None)
        if self._followed is not None:
            digests = digests_of(receipts_of(receipt, self._servers))
            is_whole = not partial if last is None else last.base.is_whole
            base = Base(digests, is_whole, fields.get("selector"))
            self._last_sent = LastSent(base, told.tag, self._held, told.wanted)
        return receipt

    def _deal_out(self, shards: Mapping[str, Shard], told: Told, *, partial: bool) -> None:
        """Send this rank's parts. Raises on every rank if one of them fails."""
        self._known = {
            digest: self._known[digest]
            if digest in self._known
            else read_shards(Shards(digest, told.lines[digest]))
            for digest in told.wanted
        }
        followed = self._followed
        if followed is None:
            self._deal(self._sends(shards, told), told)
            return
        if told.since is None:
            self._ranks.together(lambda: followed.hold(shards, self._kinds))
            self._deal(self._sends(shards, told), told)
        else:
            self._deal_changes(followed, shards, told, partial=partial)
        followed.note_sent(told.tag)

    def _deal_changes(
        self, followed: Followed, shards: Mapping[str, Shard], told: Told, *, partial: bool
    ) -> None:
        """Send the changes of this rank's parts, then all of what has to come whole."""
        assert self._dealing is not None
        assert told.since is not None
        since, places = told.since, {name: at for at, name in enumerate(self._dealing.names)}
        # a part of a version may lack what belongs together with a tensor that is taken whole alone
        alone = self._of_other_shapes() | (set() if partial else self._whole_alone)
        found = self._ranks.together(
            lambda: followed.follow(shards, self._kinds, alone, since=since)
        )
        # the parts of a tensor come all whole, or all as changes
        whole = set[str]().union(*self._ranks.gather({*found.whole}))
        changes = {name: change for name, change in found.changes.items() if name not in whole}
        buckets = self._buckets(told)
        cuts = self._ranks.together(
            lambda: {first: cut_changes(changes, shards, own) for first, own in buckets.items()}
        )
        counts = self._ranks.gather(
            {
                first: sorted((places[name], len(change.indices)) for name, change in cut.items())
                for first, cut in cuts.items()
            }
        )
        if any(cut for of_rank in counts for cut in of_rank.values()):
            changed = {first: [of_rank[first] for of_rank in counts] for first in cuts}
            sends = self._ranks.together(lambda: self._sends_of_changes(cuts, changed, told))
            unpatched = self._deal(sends, told, load_format=SPARSE, changed=changed)
            unpatched = self._ranks.tell(None if self._client is None else lambda: unpatched)
            self._whole_alone |= unpatched & places.keys()
            whole |= unpatched & places.keys()
        if whole:
            tensors = sorted(places[name] for name in whole)
            self._deal(self._sends(shards, told, whole), told, tensors=tensors)

    def _deal(
        self,
        sends: Mapping[int, Iterator[torch.Tensor]],
        told: Told,
        *,
        load_format: str | None = None,
        **sent: object,
    ) -> set[str]:
        """Send what a call to each server describes by the fields ``sent``.

        Returns the names of tensors that have to come whole, on rank 0.
        """
        engine = functools.partial(mooncake_at, self._address) if self._mooncake else None
        sending = Sending(sends, self._group, engine)

        def start() -> dict[str, Future[Any]]:
            return {} if self._client is None else self._start_calls(told, load_format, sent)

        return self._ranks.together(lambda: self._carry_out(sending, start))

    def _carry_out(
        self, sending: Sending, start: Callable[[], Mapping[str, Future[Any]]]
    ) -> set[str]:
        assert self._group is not None
        calls = Calls(start(), is_fleet=self._is_fleet)
        try:
            try:
                sending.run(calls.check)
            except GroupFailed:
                # the servers may know why
                calls.find_reason()
                raise
            calls.finish()
        except BaseException as error:
            self._group.fail(f"rank {self._rank} of the trainer: {error}")
            raise
        finally:
            calls.cancel()
        self._are_lines_known = True
        return calls.unpatched

    def _start_calls(
        self, told: Told, load_format: str | None, sent: Mapping[str, object]
    ) -> dict[str, Future[Any]]:
        described = {
            "format": FORMAT,
            "held": self._held,
            "lines": {} if self._are_lines_known else self._lines,
            "wanted": self._by_rank(told),
            "bucket_bytes": self._bucket_bytes,
            "relays": self._relays,
            "mooncake": self._mooncake,
            **sent,
        }
        fields = {
            "wire": "shards",
            "group_name": self._group_name,
            "body": base64.b64encode(msgspec.msgpack.encode(described)).decode(),
            "load_format": load_format,
        }
        return {s.url: self._start(s.update, "parts", **fields) for s in self._servers}

    def _by_rank(self, told: Told) -> dict[int, str]:
        """Return what each rank of the servers uses, by its rank in the group."""
        return {self._trainers + at: digest for at, digest in enumerate(told.wanted)}

    def _sends(
        self, shards: Mapping[str, Shard], told: Told, only: Collection[str] | None = None
    ) -> dict[int, Iterator[torch.Tensor]]:
        """Return what goes to the first rank of each chain: the buckets, packed one by one."""
        return {
            first: _packed(buckets, shards) for first, buckets in self._buckets(told, only).items()
        }

    def _sends_of_changes(
        self,
        cuts: Mapping[int, Mapping[str, Change]],
        changed: Mapping[int, Sequence[Counts]],
        told: Told,
    ) -> dict[int, Iterator[torch.Tensor]]:
        assert self._dealing is not None
        sends: dict[int, Iterator[torch.Tensor]] = {}
        for first, counts in changed.items():
            rows, found = self._dealing.changed(
                counts, self._used_by(first, told), self._bucket_bytes
            )
            own = [bucket for bucket in found if bucket.source == self._rank]
            sends[first] = _packed(own, rows_of(cuts[first], rows, own))
        return sends

    def _buckets(self, told: Told, only: Collection[str] | None = None) -> dict[int, list[Bucket]]:
        """Return the buckets of whole parts for the first rank of each chain, of ``only`` these."""
        assert self._dealing is not None
        if only is None and self._derived is not None and self._derived[0] == told.wanted:
            return self._derived[1]
        found: dict[int, list[Bucket]] = {}
        for first, *_ in chains_of(self._by_rank(told), relays=self._relays):
            wanted = self._used_by(first, told)
            if only is not None:
                wanted = {name: region for name, region in wanted.items() if name in only}
            found[first] = self._dealing.buckets(
                self._rank, first - self._trainers, wanted, self._bucket_bytes
            )
        if only is None:
            self._derived = told.wanted, found
        return found

    def _used_by(self, rank: int, told: Told) -> dict[str, Region]:
        """Return what a server's rank uses of the tensors that the trainer has."""
        used = self._known[told.wanted[rank - self._trainers]]
        kinds = self._kinds
        return {name: held.regions[0] for name, held in used.items() if name in kinds}

    def _of_other_shapes(self) -> set[str]:
        """Return the tensors of another shape at a server: positions in them lie elsewhere."""
        kinds = self._kinds
        return {
            name
            for used in self._known.values()
            for name, held in used.items()
            if name in kinds and kinds[name][1] != held.shape
        }

    @property
    def _kinds(self) -> Kinds:
        assert self._dealing is not None
        return self._dealing.kinds

    # ---- how -------------------------------------------------------------------------

    def _listen(self) -> tuple[str, int, int]:
        """Make rank 0's side of the group. Return its address and port, and the servers' ranks."""
        assert self._client is not None
        self._servers = servers_of(self._client)
        calls = [self._start(server.status) for server in self._servers]
        self._of_server = [len(call.result()["ranks"]) for call in calls]
        receivers = sum(self._of_server)
        self._group = self._make_group(receivers, None)
        address = self._master_address or self._group.address_for(self._servers[0].url)
        return address, self._group.port, receivers

    def _is_joined(self) -> bool:
        """Return whether the servers that take part now are in the group."""
        is_same = self._client is None or [*servers_of(self._client)] == [*self._servers]
        return self._group is not None and is_same

    def _make_group(self, receivers: int, master: tuple[str, int] | None) -> TrainerGroup:
        return TrainerGroup(
            self._group_name,
            receivers,
            backend=self._backend,
            timeout_s=self._timeout_s,
            rank=self._rank,
            trainers=self._trainers,
            master=master,
        )

    def _join(self, address: str, port: int, receivers: int) -> None:
        if self._group is None:
            self._group = self._make_group(receivers, (address, port))
        self._address = self._group.address_for(f"tcp://{address}:{port}")
        try:
            self._meet(self._group)
        except BaseException as error:
            self._group.fail(f"rank {self._rank} of the trainer: {error}")
            raise

    def _meet(self, group: TrainerGroup) -> None:
        formed = group.form()
        joins: list[Future[Any]] = []
        for place, server in enumerate(self._servers):
            offset = self._trainers + sum(self._of_server[:place])
            fields = group.join_of(server.url, offset, self._master_address)
            joins.append(self._start(server.join_group, **fields))
        try:
            while wait([formed, *joins], MEET_POLL_S, FIRST_EXCEPTION).not_done:
                raise_failures([*joins, formed])
                if (why := group.why_failed()) is not None:
                    raise RuntimeError(why)
            raise_failures([*joins, formed])
        except RuntimeError as error:
            raise GroupFailed(f"group {self._group_name!r} was not formed: {error}") from error
        finally:
            for server, join in zip(self._servers, joins, strict=True):
                # a server abandons a cancelled join
                if not join.cancel() and join.exception() is None:
                    self._joined.append(server)

    def _start(
        self, call: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **fields: object
    ) -> Future[T]:
        assert self._client is not None
        return self._client.portal.start_task_soon(functools.partial(call, *args, **fields))


def _packed(buckets: Iterable[Bucket], shards: Mapping[str, Shard]) -> Iterator[torch.Tensor]:
    """Yield the bytes of each bucket, when they are sent."""
    for bucket in buckets:
        yield pack(bucket, shards)


def _is_refused(error: BaseException) -> bool:
    """Return whether ranks have refused what came. Other servers may have waited for them."""
    causes = error.report.failures.values() if isinstance(error, FleetRefused) else [error]
    kinds = {type(cause) for cause in causes}
    return not kinds.isdisjoint(_OF_RANKS) and kinds <= {*_OF_RANKS, GroupFailed}
