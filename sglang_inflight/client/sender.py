"""Broadcast a trainer's weights to running servers, one whole version at a time."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal

from sglang_inflight.client.answers import Session
from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.async_fleet import AsyncFleet
from sglang_inflight.client.base import Base, NotFromBase, Version, digests_of
from sglang_inflight.client.buckets import Bucket, Piece, fill_buckets
from sglang_inflight.client.changes import Snapshot
from sglang_inflight.client.fields import SessionFields
from sglang_inflight.client.report import FleetRefused, Report
from sglang_inflight.client.trainer_group import POLL_S, Backend, TrainerGroup, choose_backend
from sglang_inflight.vocabulary.answers import Receipt
from sglang_inflight.vocabulary.errors import RankFailed, Refused

if TYPE_CHECKING:
    from sglang_inflight.client.changes import NamedTensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
Receipt_co = TypeVar("Receipt_co", covariant=True)

GROUP_NAME = "inflight_sender"
BUCKET_BYTES = 64 << 20
# time for a server to report why a broadcast failed: its error tells more than ours
REASON_S = 5.0


class GroupFailed(Refused):
    """The process group was not formed, or it broke. Nothing has changed."""


class Target(Protocol[Receipt_co]):
    """A ``Client`` or a ``Fleet``."""

    @property
    def client(self) -> AsyncClient | AsyncFleet: ...

    @property
    def portal(self) -> BlockingPortal: ...

    @property
    def session(self) -> Callable[..., AbstractContextManager[Receipt_co]]: ...


def servers_of(target: Target[Any]) -> Sequence[AsyncClient]:
    """Return the client of each server that takes part in updates."""
    inner = target.client
    return inner.taking_part if isinstance(inner, AsyncFleet) else (inner,)


def receipts_of(outcome: object, servers: Sequence[AsyncClient]) -> Mapping[str, Receipt]:
    """Return the receipts of a ``Client`` or of a ``Fleet``, by URL."""
    if isinstance(outcome, Report):
        return outcome.answers
    assert isinstance(outcome, Session)
    assert outcome.receipt is not None
    return {servers[0].url: outcome.receipt}


class Sender(Generic[Receipt_co]):
    """Sends a trainer's weights to a server, or to all servers of a fleet.

        with Client(url) as client, Sender(client) as sender:
            for step in …:
                sender.send(model.named_parameters(), weight_version=f"{step}")

    The sender is rank 0 of a process group with the servers' ranks. Each ``send`` is a session:
    its tensors are broadcast in buckets, staged while the servers generate, and go live together
    at its end. The trainer must not change its weights until ``send`` returns.

    If ``send`` raises ``Refused`` or a child of it, nothing has changed, and ``send`` may be
    repeated. If the trainer is killed, the session ends with its lease, and the next group of the
    same name replaces this one.

    A broadcast carries no name: ranks take the next broadcast for the next expected one. So a
    failure between the start of a bucket's call and its good answer breaks the group: both sides
    leave it, and the next ``send`` joins anew. A failure elsewhere (in the trainer's own
    generator, at the begin or the end of the session) leaves the group intact.

    With ``sparse`` the sender keeps a copy of the last version in this machine's memory, and sends
    the elements that have changed. It sends a tensor whole where that is smaller, and for values
    that servers take only so (NaN, infinity, dtypes other than floats of 2 bytes or more). Servers
    name what they take only whole, because SGLang finishes it after loading: it follows in the same
    session, with the tensors that it is finished together with. Later versions bring these whole at
    once.

    It sends a whole version if a server does not serve the last one sent: at first, and after a
    failure, a rollback, a restart or another trainer's update. If the ranks refuse changes, the
    same ``send`` sends the version whole. If they take that, the sender sends whole versions until
    it joins again. In every case ``named_tensors`` is read once, in its order.

    A server keeps the names, dtypes and shapes of a bucket of many tensors, and a later ``send``
    names them by a digest. A server that does not keep them asks for them, while the broadcast
    waits.

    The sender does not gather shards: one process sends whole tensors, under the names of the
    checkpoint. The sender does not convert tensors. The sender does not run beside the trainer's
    own code: it belongs to one thread, and holds its client's one session during ``send``.
    """

    def __init__(
        self,
        client: Target[Receipt_co],
        *,
        group_name: str = GROUP_NAME,
        backend: Backend | None = None,
        master_address: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        sparse: bool = False,
        check: bool = False,
    ) -> None:
        """Create a sender. Trainers of one server need different ``group_name``.

        ``backend`` is by default NCCL if this process has a GPU, else gloo. NCCL needs one GPU for
        each rank, ours included, and uses the current one. ``master_address`` is this machine's
        address for the servers, by default the local address of its route to them. A bucket takes
        at most ``bucket_bytes`` here and on each rank. ``timeout_s`` is the time limit for joining.
        ``sparse`` sends changed elements: it takes memory for a copy of the weights. ``check``
        sends each tensor's digest along: if a bit changes on the way, ``send`` raises ``Altered``
        (``FleetRefused`` for a fleet), and nothing has changed.
        """
        import torch

        self._client = client
        self._update: Callable[..., Coroutine[Any, Any, Any]] = client.client.update
        self._servers = servers_of(client)
        self._group_name = group_name
        self._backend = choose_backend(backend)
        self._device = f"cuda:{torch.cuda.current_device()}" if self._backend == "nccl" else "cpu"
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._check = check
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None
        # servers in the group
        self._joined: list[AsyncClient] = []
        # whether the ranks have received every broadcast
        self._is_in_step = True
        # the last version, or None without ``sparse``
        self._snapshot = Snapshot() if sparse else None
        # None: the servers serve something else, as far as we know
        self._base: Base | None = None
        self._takes_changes = True
        # names of the tensors that servers take whole alone, as far as they have said
        self._whole_alone: set[str] = set()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def join(self) -> None:
        """Form the group if there is none. ``send`` calls this by itself.

        A group of other servers than those that take part in the fleet now is left before. Raises a
        server's refusal to join, or ``GroupFailed``.
        """
        servers = servers_of(self._client)
        if self._group is not None and [*servers] == [*self._servers]:
            return
        self.leave()
        self._servers = servers
        calls = [self._start(server.status) for server in self._servers]
        ranks = [len(call.result()["ranks"]) for call in calls]
        self._group = TrainerGroup(
            self._group_name, sum(ranks), backend=self._backend, timeout_s=self._timeout_s
        )
        self._is_in_step = False
        try:
            self._meet(self._group, ranks)
        except BaseException:
            self.leave()
            raise
        self._is_in_step = True
        self._takes_changes = True
        self._whole_alone.clear()

    def send(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        weight_version: str | None = None,
        partial: bool = False,
        **fields: Unpack[SessionFields],
    ) -> Receipt_co:
        """Send weights, commit them, and return the receipt, or a fleet's report.

        ``named_tensors`` may be a generator: at most one bucket is held here. With ``partial``,
        missing tensors keep their values; without, the servers refuse and name a missing tensor.
        ``fields`` are the fields of ``Client.session``.
        """
        commit = functools.partial(self._commit, weight_version=weight_version, **fields)
        if self._snapshot is None:
            pieces = (Piece.whole(name, tensor) for name, tensor in named_tensors)
            return commit(pieces, partial=partial)
        version = Version(named_tensors, self._snapshot)
        selector = fields.get("selector")
        # nothing is known of the servers until a receipt comes
        base, self._base = self._base, None
        why_refused: str | None = None
        if base is not None and base.fits(partial, selector) and self._takes_changes:
            # a part of a version may lack what belongs together with such a tensor
            whole = set[str]() if partial else self._whole_alone
            try:
                changes = version.changes(partial=partial, whole=whole)
                receipt = commit(changes, partial=True, base=base)
            except NotFromBase as error:
                logger.info("A whole version is sent: %s", error)
            except Refused as error:
                if not version.can_be_sent_again or not _is_of_the_ranks(error):
                    raise
                why_refused = str(error)
            else:
                digests = digests_of(receipts_of(receipt, self._servers))
                self._base = base._replace(digests=digests)
                return receipt
        receipt = commit(version.whole(), partial=partial)
        digests = digests_of(receipts_of(receipt, self._servers))
        self._base = Base(digests, not partial, selector)
        if why_refused is not None:
            logger.warning("Whole versions are sent, because changes were refused: %s", why_refused)
            self._takes_changes = False
        return receipt

    def leave(self) -> None:
        """Leave the group on both sides.

        An unreachable server drops its side when the next group of this name is formed.
        """
        group, self._group = self._group, None
        joined, self._joined = self._joined, []
        if group is None:
            return
        # only joined servers: elsewhere a group of this name is another trainer's
        calls = [self._start(server.leave_group, self._group_name) for server in joined]
        try:
            _await_calls(calls, REASON_S)
        finally:
            group.leave()

    # ---- how -------------------------------------------------------------------------

    def _commit(
        self,
        pieces: Iterable[Piece],
        *,
        base: Base | None = None,
        **fields: Any,
    ) -> Receipt_co:
        """Send ``pieces`` in a session. Raises ``NotFromBase`` unless ``base`` is served."""
        self.join()
        try:
            with self._client.session(**fields) as receipt:
                if base is not None:
                    calls = {server.url: self._start(server.status) for server in self._servers}
                    served = {url: call.result() for url, call in calls.items()}
                    base.require_served(digests_of(served))
                unpatched = self._send_all(pieces)
                if self._snapshot is not None:
                    names = sorted(unpatched & self._snapshot.keys())
                    self._send_all(Piece.whole(name, self._snapshot[name]) for name in names)
                    self._whole_alone.update(names)
        except BaseException:
            # the session is dropped by now, and no rank waits for a broadcast
            if not self._is_in_step:
                self.leave()
            raise
        return receipt

    def _meet(self, group: TrainerGroup, ranks: Sequence[int]) -> None:
        formed = group.form()
        joins: list[Future[Any]] = []
        for place, server in enumerate(self._servers):
            fields = group.join_of(server.url, 1 + sum(ranks[:place]), self._master_address)
            joins.append(self._start(server.join_group, **fields))
        try:
            wait([formed, *joins], return_when=FIRST_EXCEPTION)
            if formed.done() and formed.exception() is not None:
                _await_calls(joins, REASON_S)
            raise_failures(joins)
            formed.result()
        except RuntimeError as error:
            raise GroupFailed(f"group {self._group_name!r} was not formed: {error}") from error
        finally:
            for server, join in zip(self._servers, joins, strict=True):
                # a server abandons a cancelled join
                if not join.cancel() and join.exception() is None:
                    self._joined.append(server)

    def _send_all(self, pieces: Iterable[Piece]) -> set[str]:
        """Send ``pieces``. Return the names of tensors that servers take whole alone."""
        unpatched = set[str]()
        for bucket in fill_buckets(
            pieces, self._bucket_bytes, self._device, with_digests=self._check
        ):
            unpatched = self._send(bucket)
        return unpatched

    def _send(self, bucket: Bucket) -> set[str]:
        """Send a bucket. Return the names of tensors that the session has to bring whole."""
        assert self._group is not None
        self._is_in_step = False
        answer = self._start(
            self._update, "distributed", group_name=self._group_name, **bucket.describe()
        )
        try:
            self._await_broadcast(self._group.broadcast(bucket.flat), answer)
            staged = answer.result()
        except RuntimeError as error:
            _await_calls([answer], REASON_S)
            raise_failures([answer])
            raise GroupFailed(
                f"a broadcast in group {self._group_name!r} failed: {error}"
            ) from error
        finally:
            # only after an interruption; otherwise the call is done
            answer.cancel()
        self._is_in_step = True
        answers = staged.answers.values() if isinstance(staged, Report) else [staged]
        return {name for each in answers for name in each.unpatched}

    @staticmethod
    def _await_broadcast(is_sent: Callable[[], bool], answer: Future[Any]) -> None:
        """Wait for the broadcast. Raises a server's refusal at once: no rank will receive then."""
        overdue = float("inf")
        while not is_sent():
            if answer.done():
                answer.result()
                overdue = min(overdue, time.monotonic() + REASON_S)
            if time.monotonic() > overdue:
                raise RuntimeError("the ranks have received it, but the broadcast does not end")
            time.sleep(POLL_S)

    def _start(
        self, call: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **fields: object
    ) -> Future[T]:
        """Start ``call`` on the client's event loop, while this thread broadcasts."""
        return self._client.portal.start_task_soon(functools.partial(call, *args, **fields))


def _is_of_the_ranks(error: Refused) -> bool:
    """Return whether ranks refused the content, and nothing else failed on any server."""
    causes = error.report.failures.values() if isinstance(error, FleetRefused) else [error]
    return all(type(cause) in (Refused, RankFailed) for cause in causes)


def _await_calls(calls: Sequence[Future[Any]], patience_s: float) -> None:
    """Wait ``patience_s`` seconds for all calls, then cancel the late ones."""
    _, late = wait(calls, timeout=patience_s)
    for call in late:
        call.cancel()


def raise_failures(calls: Iterable[Future[Any]]) -> None:
    """Raise the first failure among the finished calls."""
    for call in calls:
        if call.done() and not call.cancelled():
            call.result()
