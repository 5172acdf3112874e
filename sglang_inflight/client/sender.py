"""From a trainer's memory into running servers: a version at a time, whole or not at all."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from anyio.from_thread import BlockingPortal

from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.async_fleet import AsyncFleet
from sglang_inflight.client.buckets import Bucket, fill_buckets
from sglang_inflight.client.trainer_group import POLL_S, Backend, TrainerGroup
from sglang_inflight.errors import Refused

if TYPE_CHECKING:
    from sglang_inflight.client.buckets import NamedTensor

T = TypeVar("T")
Receipt_co = TypeVar("Receipt_co", covariant=True)

GROUP_NAME = "inflight_sender"
BUCKET_BYTES = 64 << 20
# for a server to say why a broadcast failed: it knows more than we do
REASON_S = 5.0


class GroupFailed(Refused):
    """The trainer and the ranks could not form their group, or it broke. Nothing has changed."""


class Target(Protocol[Receipt_co]):
    """A ``Client`` or a ``Fleet``."""

    @property
    def client(self) -> AsyncClient | AsyncFleet: ...

    @property
    def portal(self) -> BlockingPortal: ...

    @property
    def session(self) -> Callable[..., AbstractContextManager[Receipt_co]]: ...


class Sender(Generic[Receipt_co]):
    """Sends a trainer's weights to a server, or to all servers of a fleet, as it trains.

        with Client(url) as client, Sender(client) as sender:
            for step in …:
                sender.send(model.named_parameters(), weight_version=f"{step}")

    It is rank 0 of a process group whose other ranks are the servers'. Each ``send`` is a
    session: its tensors are broadcast in buckets, staged while the servers generate, and go
    live together at its end. What the trainer may do with its weights meanwhile: nothing,
    until ``send`` returns.

    Where ``send`` raises ``Refused`` or a child of it, nothing has changed, and it may be
    called again; otherwise the error says what is known. If the trainer is killed, the
    session ends with its lease and the group gives way to the next one of its name.

    A broadcast carries no name: ranks take the next one that is sent for the next one that
    they expect. So a failure between the begin of a bucket's call and its good answer costs
    the group: both sides leave it, and the next ``send`` joins anew. A failure elsewhere (in
    the trainer's own generator, at the begin or the end of the session) leaves it as it is.

    What it does not do: gather (it takes whole tensors, under the names of the checkpoint,
    so of a sharded trainer one process sends), convert, or run beside the trainer's own
    code. It belongs to one thread, and holds the one session of its client while it sends.
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
    ) -> None:
        """``group_name`` tells this trainer's group from those of a server's other trainers.

        ``backend`` is NCCL if this process has a GPU, and gloo if not; NCCL wants a GPU for
        each rank, ours included, and uses the current one. ``master_address`` is that of this
        machine as the servers reach it, by default the one that reaches them. A bucket is of
        ``bucket_bytes`` at most, here and on each rank. ``timeout_s`` is how long the ranks
        may take to join.
        """
        import torch

        self._client = client
        inner = client.client
        self._update: Callable[..., Coroutine[Any, Any, object]] = inner.update
        self._servers = inner.servers if isinstance(inner, AsyncFleet) else (inner,)
        self._group_name = group_name
        self._backend: Backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._device = f"cuda:{torch.cuda.current_device()}" if self._backend == "nccl" else "cpu"
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None
        # the servers that are in it
        self._joined: list[AsyncClient] = []
        # whether what was broadcast is what was received
        self._is_in_step = True

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def join(self) -> None:
        """Form the group, unless it is there. ``send`` does so by itself.

        Raises what a server that would not join has said, or ``GroupFailed``.
        """
        if self._group is not None:
            return
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

    def send(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        weight_version: str | None = None,
        partial: bool = False,
        **fields: Any,
    ) -> Receipt_co:
        """Make these the weights that are served: the receipt, or a fleet's report.

        ``named_tensors`` may be a generator: no more than a bucket of it is held here. With
        ``partial`` what is not sent stays; without, a tensor that is missing is refused by
        its name. ``fields`` are those of ``Client.session``.
        """
        self.join()
        try:
            with self._client.session(
                weight_version=weight_version, partial=partial, **fields
            ) as receipt:
                for bucket in fill_buckets(named_tensors, self._bucket_bytes, self._device):
                    self._send(bucket)
        except BaseException:
            # the session is dropped by now, so that no rank waits for a broadcast any more
            if not self._is_in_step:
                self.leave()
            raise
        return receipt

    def leave(self) -> None:
        """Leave the group, on both sides, if we are in one. What a server does not hear of, it
        clears away when a group of this name is formed again."""
        group, self._group = self._group, None
        joined, self._joined = self._joined, []
        if group is None:
            return
        # no server else: what has the name there is another trainer's
        calls = [self._start(server.leave_group, self._group_name) for server in joined]
        try:
            _hear(calls, REASON_S)
        finally:
            group.leave()

    # ---- how -------------------------------------------------------------------------

    def _meet(self, group: TrainerGroup, ranks: Sequence[int]) -> None:
        formed = group.form()
        joins: list[Future[Any]] = []
        for place, server in enumerate(self._servers):
            fields = {
                "master_address": self._master_address or group.address_for(server.url),
                "master_port": group.port,
                "rank_offset": 1 + sum(ranks[:place]),
                "world_size": 1 + sum(ranks),
                "group_name": self._group_name,
                "backend": self._backend,
            }
            joins.append(self._start(server.join_group, **fields))
        try:
            wait([formed, *joins], return_when=FIRST_EXCEPTION)
            if formed.done() and formed.exception() is not None:
                _hear(joins, REASON_S)
            _raise_refusals(joins)
            formed.result()
        except RuntimeError as error:
            raise GroupFailed(f"group {self._group_name!r} was not formed: {error}") from error
        finally:
            for server, join in zip(self._servers, joins, strict=True):
                # a server gives up what is cancelled
                if not join.cancel() and join.exception() is None:
                    self._joined.append(server)

    def _send(self, bucket: Bucket) -> None:
        assert self._group is not None
        self._is_in_step = False
        answer = self._start(
            self._update, "distributed", group_name=self._group_name, **bucket.describe()
        )
        try:
            self._await_broadcast(self._group.broadcast(bucket.flat), answer)
            answer.result()
        except RuntimeError as error:
            _hear([answer], REASON_S)
            _raise_refusals([answer])
            raise GroupFailed(
                f"a broadcast in group {self._group_name!r} failed: {error}"
            ) from error
        finally:
            # for whoever interrupts us; it is done otherwise
            answer.cancel()
        self._is_in_step = True

    @staticmethod
    def _await_broadcast(is_sent: Callable[[], bool], answer: Future[Any]) -> None:
        """Raises what the server has said, if it is a refusal: then nobody will receive it."""
        overdue = float("inf")
        while not is_sent():
            if answer.done():
                answer.result()
                overdue = min(overdue, time.monotonic() + REASON_S)
            if time.monotonic() > overdue:
                raise RuntimeError("the ranks have received it, and it does not end")
            time.sleep(POLL_S)

    def _start(
        self, call: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **fields: object
    ) -> Future[T]:
        """On the client's event loop, while this thread broadcasts."""
        return self._client.portal.start_task_soon(functools.partial(call, *args, **fields))


def _hear(calls: Sequence[Future[Any]], patience_s: float) -> None:
    """Until each is answered, or nobody waits any longer."""
    _, late = wait(calls, timeout=patience_s)
    for call in late:
        call.cancel()


def _raise_refusals(calls: Sequence[Future[Any]]) -> None:
    """What an answer was, if it was an error."""
    for call in calls:
        if call.done() and not call.cancelled():
            call.result()
