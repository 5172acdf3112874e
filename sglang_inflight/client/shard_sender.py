"""Sends the shards of a trainer's ranks straight to the ranks of servers that use them."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, Unpack

import msgspec

from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.fields import SessionFields
from sglang_inflight.client.sender import REASON_S, GroupFailed, Receipt_co, Target, servers_of
from sglang_inflight.client.trainer_group import POLL_S, Backend, TrainerGroup, choose_backend
from sglang_inflight.vocabulary.errors import ERRORS, Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Bucket, Dealing
from sglang_inflight.vocabulary.shards import Held, Shards, read_shards, write_shards

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

GROUP_NAME = "inflight_shards"
BUCKET_BYTES = 16 << 20
# pause between looks at a group that forms
MEET_POLL_S = 0.05
T = TypeVar("T")


class Shard(NamedTuple):
    """A part of a tensor, as one rank of the trainer has it.

    ``tensor`` lies at ``starts`` in a tensor of ``shape``. All are in elements.
    """

    tensor: torch.Tensor
    starts: tuple[int, ...]
    shape: tuple[int, ...]


class Told(NamedTuple):
    """Rank 0 tells the other ranks of the trainer this before it sends a version."""

    # what each rank of the servers uses, in the group's order
    wanted: Sequence[str]
    # lines of the digests that the ranks may not know
    lines: Mapping[str, bytes]


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
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create a sender. ``client``: on rank 0 alone.

        ``ranks`` is the trainer's own group, by default that of all its processes: its ranks agree
        in it. ``master_address`` is rank 0's machine for all others, by default its address on the
        way to the first server. A bucket takes ``bucket_bytes`` here and on a server's rank, and
        each rank has one under way for each rank of the servers. The rest is as in ``Sender``.
        """
        import torch.distributed as dist

        self._client = client
        self._ranks = ranks
        self._rank, self._trainers = dist.get_rank(ranks), dist.get_world_size(ranks)
        if (client is None) == (self._rank == 0):
            raise ValueError("rank 0 of the trainer has a client, and no other rank has one")
        self._servers = () if client is None else servers_of(client)
        self._group_name = group_name
        self._backend = choose_backend(backend)
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None
        # servers in the group, on rank 0
        self._joined: list[AsyncClient] = []
        # what the trainer's ranks have, and what the servers' ranks use
        self._held: list[str] = []
        self._dealing: Dealing | None = None
        self._known: dict[str, Mapping[str, Region]] = {}
        # what this rank sends to each receiver, and what those use
        self._derived: tuple[Sequence[str], list[list[Bucket]]] | None = None
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
        """Form the group if there is none. ``send`` calls this by itself. Raises as ``Sender``."""
        if self._group is not None:
            return
        self._held, self._are_lines_known = [], False
        try:
            told = self._tell(None if self._client is None else self._listen)
            self._together(lambda: self._join(*told))
        except BaseException:
            self.leave()
            raise

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
        self.join()
        try:
            shards = self._together(lambda: dict(map(_shard_of, named_tensors)))
            self._agree(shards)
            return self._send(shards, weight_version=weight_version, partial=partial, **fields)
        except BaseException:
            self.leave()
            raise

    # ---- what goes where -------------------------------------------------------------

    def _agree(self, shards: Mapping[str, Shard]) -> None:
        """Find what all ranks of the trainer have, if it has changed."""
        own = write_shards((name, _held(shard)) for name, shard in shards.items())
        digests = self._gather(own.digest)
        if digests == self._held:
            return
        # a digest stands for its lines, so ranks with equal shards say them once
        lines = self._gather(None if own.digest in digests[: self._rank] else own.lines)
        self._lines = {d: found for d, found in zip(digests, lines, strict=True) if found}

        def deal() -> Dealing:
            return Dealing([read_shards(Shards(d, self._lines[d])) for d in digests])

        self._dealing = self._together(deal)
        self._held, self._are_lines_known, self._derived = digests, False, None

    def _ask(self) -> Told:
        """Ask the servers what their ranks use."""
        known = sorted(self._known)
        calls = [self._start(server.plan, known=known) for server in self._servers]
        ranks = [rank for call in calls for rank in call.result()["ranks"]]
        lines = {
            rank["digest"]: msgspec.convert(rank["lines"], bytes)
            for rank in ranks
            if rank["lines"] is not None
        }
        return Told([rank["digest"] for rank in ranks], lines)

    # ---- a version -------------------------------------------------------------------

    def _send(self, shards: Mapping[str, Shard], **fields: Any) -> Receipt_co | None:
        if self._client is None:
            self._deal_out(shards, self._tell(None))
            # the outcome of the session
            self._tell(None)
            return None
        # others wait for a word of rank 0, for that of ``_ask`` and then for the outcome
        is_owed = True
        try:
            with self._client.session(**fields) as receipt:
                told = self._ask()
                self._tell(lambda: told)
                is_owed = False
                self._deal_out(shards, told)
                is_owed = True
        except BaseException as error:
            if is_owed:
                self._say(error)
            raise
        self._tell(lambda: None)
        return receipt

    def _deal_out(self, shards: Mapping[str, Shard], told: Told) -> None:
        """Send this rank's parts. Raises on every rank if one of them fails."""
        self._known = {
            digest: self._known[digest]
            if digest in self._known
            else _used(Shards(digest, told.lines[digest]))
            for digest in told.wanted
        }
        sending = _Sending(self._sends(shards, told), self._group, self._trainers)
        self._together(lambda: self._carry_out(sending, told))

    def _carry_out(self, sending: _Sending, told: Told) -> None:
        assert self._group is not None
        call = None if self._client is None else self._start_call(told)
        try:
            try:
                sending.run(lambda: _raise_first([] if call is None else [call]))
            except GroupFailed:
                # the servers may know why
                if call is not None and wait([call], REASON_S).done:
                    call.result()
                raise
            if call is not None:
                call.result()
        except BaseException as error:
            self._group.fail(f"rank {self._rank} of the trainer: {error}")
            raise
        finally:
            if call is not None:
                call.cancel()
        self._are_lines_known = True

    def _start_call(self, told: Told) -> Future[Any]:
        assert self._client is not None
        wanted = {self._trainers + at: digest for at, digest in enumerate(told.wanted)}
        sent = {
            "held": self._held,
            "lines": {} if self._are_lines_known else self._lines,
            "wanted": wanted,
            "bucket_bytes": self._bucket_bytes,
        }
        body = base64.b64encode(msgspec.msgpack.encode(sent)).decode()
        return self._start(
            self._client.client.update,
            "parts",
            wire="shards",
            group_name=self._group_name,
            body=body,
        )

    def _sends(
        self, shards: Mapping[str, Shard], told: Told
    ) -> list[Iterator[tuple[Bucket, torch.Tensor]]]:
        """Return what goes to each rank of the servers: the buckets, packed one by one."""
        assert self._dealing is not None
        if self._derived is None or self._derived[0] != told.wanted:
            kinds = self._dealing.kinds
            buckets = []
            for receiver, digest in enumerate(told.wanted):
                wanted = {name: r for name, r in self._known[digest].items() if name in kinds}
                buckets.append(
                    self._dealing.buckets(self._rank, receiver, wanted, self._bucket_bytes)
                )
            self._derived = told.wanted, buckets
        return [((b, _pack(b, shards)) for b in found) for found in self._derived[1]]

    # ---- among the trainer's ranks -------------------------------------------------------

    def _gather(self, value: T) -> list[T]:
        """Return the value of each rank."""
        import torch.distributed as dist

        found: list[Any] = [None] * self._trainers
        dist.all_gather_object(found, value, group=self._ranks)
        return found

    def _together(self, do: Callable[[], T]) -> T:
        """Do something on every rank. Raises on every rank if it fails on one."""
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = do()
        except BaseException as error:
            failure = error
        try:
            said = self._gather(_said(failure))
        except RuntimeError as error:
            gone = GroupFailed(f"a rank of the trainer is gone: {error}")
            raise failure or gone from error
        if failure is not None:
            raise failure
        for rank, each in enumerate(said):
            if each is not None:
                raise _heard(each, f"rank {rank} of the trainer")
        return result  # type: ignore[return-value]

    def _tell(self, do: Callable[[], T] | None) -> T:
        """Return on every rank what rank 0 makes, by ``do``. Raises there what it raises."""
        import torch.distributed as dist

        box: list[Any] = [None, None]
        failure: BaseException | None = None
        if do is not None:
            try:
                box[0] = do()
            except BaseException as error:
                failure, box[1] = error, _said(error)
        dist.broadcast_object_list(box, group=self._ranks, group_src=0)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise _heard(box[1], "rank 0 of the trainer")
        found: T = box[0]
        return found

    def _say(self, error: BaseException) -> None:
        """Have the other ranks raise ``error``, where they wait for rank 0's word."""

        def fail() -> None:
            raise error

        with contextlib.suppress(type(error)):
            self._tell(fail)

    # ---- how -------------------------------------------------------------------------

    def _listen(self) -> tuple[str, int, int]:
        """Make rank 0's side of the group. Return its address and port, and the servers' ranks."""
        calls = [self._start(server.status) for server in self._servers]
        self._of_server = [len(call.result()["ranks"]) for call in calls]
        receivers = sum(self._of_server)
        self._group = self._make_group(receivers, None)
        address = self._master_address or self._group.address_for(self._servers[0].url)
        return address, self._group.port, receivers

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
                _raise_first([*joins, formed])
                if (why := group.why_failed()) is not None:
                    raise RuntimeError(why)
            _raise_first([*joins, formed])
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


class _Sending:
    """The sends of one version from one rank. One is under way to each receiver."""

    def __init__(
        self,
        sends: Sequence[Iterator[tuple[Bucket, torch.Tensor]]],
        group: TrainerGroup | None,
        trainers: int,
    ) -> None:
        assert group is not None
        self._sends = dict(enumerate(sends))
        self._group = group
        self._trainers = trainers
        # the send to each receiver, with its memory
        self._under_way: dict[int, tuple[Future[None], torch.Tensor]] = {}

    def run(self, check: Callable[[], object]) -> None:
        """Send everything. ``check`` raises to give up; so does a failure of another rank."""
        while self._sends or self._under_way:
            self._begin()
            done = [at for at, (sent, _) in self._under_way.items() if sent.done()]
            for at in done:
                sent, _ = self._under_way.pop(at)
                try:
                    sent.result()
                except RuntimeError as error:
                    raise GroupFailed(f"sending to rank {at} of the servers: {error}") from error
            if not done:
                check()
                if (why := self._group.why_failed()) is not None:
                    raise GroupFailed(why)
                wait([sent for sent, _ in self._under_way.values()], POLL_S, FIRST_COMPLETED)

    def _begin(self) -> None:
        for at in [*self._sends]:
            if at in self._under_way:
                continue
            if (following := next(self._sends[at], None)) is None:
                del self._sends[at]
                continue
            _, row = following
            self._under_way[at] = self._group.send(row, self._trainers + at), row


def _shard_of(named: tuple[str, torch.Tensor | Shard]) -> tuple[str, Shard]:
    """Return what this rank has of a tensor. Raises ``Refused`` for a ``DTensor`` to be reduced."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    name, tensor = named
    if isinstance(tensor, Shard):
        return name, tensor
    if not isinstance(tensor, DTensor):
        return name, Shard(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise Refused(f"{name!r} is a sum that its ranks have not made yet: {tensor.placements}")
    _, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return name, Shard(tensor.to_local().detach(), tuple(starts), tuple(tensor.shape))


def _held(shard: Shard) -> Held:
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    region = Region(tuple(shard.starts), tuple(shard.tensor.shape))
    return Held(dtype, tuple(shard.shape), (region,) if shard.tensor.numel() else ())


def _used(shards: Shards) -> Mapping[str, Region]:
    """Return what a rank of a server uses."""
    return {name: held.regions[0] for name, held in read_shards(shards).items()}


def _pack(bucket: Bucket, shards: Mapping[str, Shard]) -> torch.Tensor:
    """Return the bytes of ``bucket``, on the device of its first tensor."""
    import torch

    device = shards[bucket.pieces[0].name].tensor.device
    row = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    for piece in bucket.pieces:
        shard = shards[piece.name]
        own = Region(tuple(shard.starts), tuple(shard.tensor.shape))
        piece.view(row).copy_(shard.tensor[piece.region.seen_from(own).slices()])
    return row


def _raise_first(calls: Iterable[Future[Any]]) -> None:
    """Raise the first failure so far."""
    for call in calls:
        if call.done():
            call.result()


def _said(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, f"{error}")


def _heard(said: tuple[str, str], who: str) -> Exception:
    kind, message = said
    return ERRORS.get(kind, GroupFailed)(f"{who}: {message}")
