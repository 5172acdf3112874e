"""Process groups with trainers, for receiving their broadcasts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from sglang_inflight.messages import (
    DistributedSource,
    Done,
    GiveUpTransferCall,
    JoinGroupCall,
)
from sglang_inflight.mooncake import Mooncake, receive_by, send_by
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.groups.filled import Filled
from sglang_inflight.scheduler.groups.process_group import (
    Formed,
    Pulse,
    free_name,
    launches,
)
from sglang_inflight.scheduler.groups.rendezvous import Rendezvous
from sglang_inflight.scheduler.groups.waited_for import WaitedFor
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.topology import own_index
from sglang_inflight.vocabulary.answers import CONTROL_SYNC
from sglang_inflight.vocabulary.errors import Refused

logger = logging.getLogger(__name__)

# Each poll takes the interpreter from the loop for a moment, so long waits poll rarely. With the
# trainer there a broadcast takes less than a millisecond, and a model may have 36,000 broadcasts.
FIRST_POLL_S = 50e-6
LAST_POLL_S = 0.005

# Limits of the broadcasts posted ahead with NCCL. The trainer's next broadcast then finds its peer.
# The buffers take this memory beside the shadow. The count is far below the number of launches
# after which a device blocks the next one.
WINDOW_BYTES = 128 << 20
WINDOW_COUNT = 64

T = TypeVar("T")


class _Transfer(Generic[T]):
    """The broadcasts of one call, in order: the buffer of each, and its content."""

    def __init__(
        self,
        expected: Iterator[tuple[torch.Tensor, T]],
        begin: Callable[[torch.Tensor, T], dist.Work | None],
    ) -> None:
        """``begin`` begins to receive into a buffer."""
        self._expected = expected
        self._begin = begin
        self._next: tuple[torch.Tensor, T] | None = None
        self._posted: deque[tuple[torch.Tensor, T]] = deque()
        self._bytes = 0

    @property
    def awaits_one(self) -> bool:
        return bool(self._posted)

    def find_next(self, window_bytes: int) -> torch.Tensor | None:
        """Return the next buffer to post now, or None. The first buffer may have any size."""
        if self._next is None:
            self._next = next(self._expected, None)
        if self._next is None:
            return None
        buffer, _ = self._next
        is_full = self._bytes + buffer.nbytes > window_bytes or len(self._posted) >= WINDOW_COUNT
        return None if self._posted and is_full else buffer

    def begin_next(self) -> dist.Work:
        """Begin to receive into the buffer that ``find_next`` has returned."""
        assert self._next is not None
        begun = self._begin(*self._next)
        assert begun is not None
        return begun

    def note_posted(self) -> None:
        assert self._next is not None
        self._posted.append(self._next)
        self._bytes += self._next[0].nbytes
        self._next = None

    def take_first(self) -> T:
        buffer, content = self._posted.popleft()
        self._bytes -= buffer.nbytes
        return content


class Group:
    """One process group in which the trainer is rank 0.

    A broadcast is awaited by polling, not by blocking: a trainer that dies or stops costs its own
    update and nothing else. NCCL's broadcast runs on the device until its data come. Waits for the
    whole device, such as for freeing memory, would wait with it. So giving up a broadcast aborts
    it, and its group with it.

    NCCL's broadcasts are posted ahead and awaited in order. Gloo's are not: gloo's timeout counts
    from the post, and a trainer may take long between two broadcasts.

    The first broadcast blocks all the same. In it NCCL makes its communicator, which needs all
    ranks of the group, and can neither be polled nor aborted. So it begins on an
    ``AbandonableThread``. If it is given up, the group is lost, and nothing touches the group any
    more.

    NCCL's broadcasts should be launched in one order on all ranks, relative to the collectives of
    the forwards. Otherwise two communicators may wait for each other. So the loop posts the first
    window of a call (``post_ahead``), at the boundary at which all ranks take the call in, and the
    staging thread only awaits it. The staging thread posts broadcasts beyond the window, the first
    broadcast of a group, and calls that come while another one is received.

    Broadcasts carry no name: the next one received is the next one sent. So a group is out of step
    with its trainer after an unfinished broadcast. The same holds after a call that was refused
    before all its broadcasts were received: the next update would receive the rest. Such a group is
    broken, and every later use is refused.
    """

    def __init__(self, name: str, formed: Formed, join_id: str | None = None) -> None:
        """``join_id`` is the id of the call that formed the group."""
        self._name = name
        self.join_id = join_id
        self._group, self._store = formed
        # whether the store ends with the trainer, as far as known; for the staging thread only
        self._store_is_trainers = True
        self._broken: str | None = None
        self._is_retired = False
        # held while a broadcast is awaited, and by ``leave``, but not during the first broadcast
        self._in_use = threading.Lock()
        # whether the call of the first broadcast has returned; for the staging thread only
        self._has_met = False
        # whether a thread is in that call now
        self._is_meeting = False
        # whether that call was given up before its return
        self._is_lost = False
        # the last transfer with every broadcast received
        self._taken: str | None = None
        # awaited or abandoned broadcasts, and the memory they may still write
        self._unfinished: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # (transfer id, transfer posted by the loop, its failure); guarded by ``_in_use``
        self._ahead: tuple[str, _Transfer[Any] | None, Exception | None] | None = None
        # destroyed, aborted or lost: not to be touched
        self._is_gone = False

    @property
    def rank(self) -> int:
        """This process's rank in the group. The trainer's ranks are the first."""
        # not by this process's rank in its own world
        return int(self._group.rank())

    def begin_between(
        self,
        received: tuple[int, torch.Tensor] | None,
        sent: tuple[int, torch.Tensor] | None,
        engine: Callable[[], Mooncake] | None = None,
    ) -> dist.Work:
        """Begin to receive from one rank, and to send to another one. At least one is given.

        Each is a rank of the group and a buffer. The work ends when both have ended. With
        ``engine`` the bytes go by Mooncake, and the group has the words. In one batch NCCL does
        both at once, on the group's communicator, and makes none for each pair of ranks.
        """
        group = self._group
        if engine is not None:
            waits: dict[str, Callable[[], object]] = {}
            if received is not None:
                waits[f"from rank {received[0]}"] = lambda: receive_by(engine(), group, *received)
            if sent is not None:
                waits[f"to rank {sent[0]}"] = lambda: send_by(engine(), group, *sent)
            return WaitedFor(waits)
        wanted = [(dist.irecv, received, "from"), (dist.isend, sent, "to")]
        ops = [(do, *given, way) for do, given, way in wanted if given is not None]
        if launches(dist.get_backend(group)):
            batch = [dist.P2POp(do, row, rank, group) for do, rank, row, _ in ops]
            return dist.batch_isend_irecv(batch)[0]

        def begin() -> dist.Work:
            works = [(f"{way} rank {rank}", do(row, rank, group)) for do, rank, row, way in ops]
            return WaitedFor({name: work.wait for name, work in works if work is not None})

        return begin() if received is None else Filled(received[1], begin)

    def receives_on(self, device: torch.device) -> torch.device:
        """Return where to receive tensors for ``device``: a backend of the host's writes there."""
        return device if launches(dist.get_backend(self._group)) else torch.device("cpu")

    def mark_taken(self, transfer_id: str) -> None:
        self._taken = transfer_id

    def give_up(self, transfer_id: str | None, reason: str) -> bool:
        """Note a failed call. Return whether the group is now out of step with its trainer."""
        if self._broken is None and (transfer_id is None or transfer_id != self._taken):
            self._broken = f"broadcasts of a refused call were not received: {reason}"
        return self._broken is not None

    def is_of_use(self) -> bool:
        """Return whether the group is in step with a living trainer. Waits for an answer."""
        return self._broken is None and Pulse(self._store).answers()

    def retire(self, reason: str) -> None:
        """Leave the group, from any thread; an awaited broadcast ends first, or is lost."""
        self._broken = self._broken or reason
        self._is_retired = True
        self.leave()

    def receive(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Fill ``tensor`` with the trainer's next broadcast. Raises like ``receive_each``."""
        for _ in self.receive_each(iter([(tensor, None)]), check):
            pass

    def post_ahead(
        self, transfer_id: str, expected: Callable[[], Iterator[tuple[torch.Tensor, Any]]]
    ) -> None:
        """Post the first window of a call, on the loop's thread. Waits for nothing.

        Call only while no other call of this group is received or queued: posts must keep the
        trainer's order. ``receive_each`` raises a failure of this method.
        """
        if not self._in_use.acquire(blocking=False):
            return
        try:
            if self._broken is not None or self._is_retired or not self._has_met:
                return
            if self._unfinished or not launches(dist.get_backend(self._group)):
                return
            transfer: _Transfer[Any] | None = None
            failure = None
            try:
                transfer = _Transfer(expected(), self._begin_broadcast)
                while (buffer := transfer.find_next(WINDOW_BYTES)) is not None:
                    self._post(transfer, buffer)
                    transfer.note_posted()
            except Exception as error:
                failure = error
            self._ahead = transfer_id, transfer, failure
        finally:
            self._in_use.release()

    def forget_ahead(self, transfer_id: str) -> None:
        """End a call. Posted broadcasts not received by now break the group."""
        with self._in_use:
            if self._ahead is None or self._ahead[0] != transfer_id:
                return
            (_, transfer, _), self._ahead = self._ahead, None
        if transfer is not None and transfer.awaits_one:
            self._break("a call ended before the broadcasts posted for it were received")

    def _take_ahead(self, transfer_id: str | None) -> _Transfer[Any] | None:
        with self._in_use:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        posted_for, transfer, failure = ahead
        if posted_for != transfer_id:
            raise Refused("broadcasts were posted for another call")
        if failure is not None:
            raise failure
        return transfer

    def receive_each(
        self,
        expected: Iterator[tuple[torch.Tensor, T]],
        check: Callable[[], None],
        transfer_id: str | None = None,
        *,
        begin: Callable[[torch.Tensor, T], dist.Work | None] | None = None,
    ) -> Iterator[T]:
        """Fill each of the ``expected`` tensors with the trainer's next broadcast.

        ``begin`` begins to receive otherwise than by a broadcast of rank 0. Then one receive is
        under way at a time. The next one begins once a content has come, before it is yielded.

        If the loop has posted the first broadcasts for ``transfer_id``, their buffers are filled
        instead. Yields a tensor's content once it is filled. Raises the errors of ``check`` while
        waiting (dropped, out of time), and ``Refused`` if the trainer is gone.
        """
        self._refuse_if_broken()
        with self._broken_by_failure():
            transfer = self._take_ahead(transfer_id)
            if transfer is None:
                transfer = _Transfer(expected, begin or self._begin_broadcast)
        window = WINDOW_BYTES if launches(dist.get_backend(self._group)) and not begin else 0
        while True:
            self._refuse_if_broken()
            with self._broken_by_failure():
                self._post_window(transfer, check, window)
                if not transfer.awaits_one:
                    return
                with self._in_use:
                    self._await_first(check)
                content = transfer.take_first()
                if begin is not None:
                    self._post_window(transfer, check, window)
            yield content

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise Refused(
                f"group {self._name!r} is broken ({self._broken}): destroy it and join anew"
            )

    @contextmanager
    def _broken_by_failure(self) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            self._break(f"{error}")
            raise
        except Exception as error:
            reason = f"{error}".split("\n")[0]
            self._break(reason)
            raise Refused(
                f"the trainer's broadcast in group {self._name!r} failed: {reason}"
            ) from error

    def _post_window(
        self, transfer: _Transfer[Any], check: Callable[[], None], window: int
    ) -> None:
        self._refuse_if_left()
        while (buffer := transfer.find_next(window)) is not None:
            if not self._has_met:
                self._meet(transfer, buffer, check)
            else:
                with self._in_use:
                    self._post(transfer, buffer)
            transfer.note_posted()

    def _begin_broadcast(self, buffer: torch.Tensor, _: object) -> dist.Work | None:
        def begin() -> dist.Work | None:
            return dist.broadcast(buffer, src=0, group=self._group, async_op=True)

        return begin() if launches(dist.get_backend(self._group)) else Filled(buffer, begin)

    def _post(self, transfer: _Transfer[Any], buffer: torch.Tensor) -> None:
        self._refuse_if_left()
        self._unfinished.append((transfer.begin_next(), buffer))

    def _meet(
        self, transfer: _Transfer[Any], tensor: torch.Tensor, check: Callable[[], None]
    ) -> None:
        """Begin the first broadcast, on an abandonable thread."""

        def begin() -> None:
            work: dist.Work | None = None
            try:
                work = transfer.begin_next()
            finally:
                with self._in_use:
                    self._is_meeting = False
                    if work is not None:
                        self._unfinished.append((work, tensor))
            if self._is_lost:
                # nobody else touches the group, and on the device it might run for ever
                self._group.abort()

        pulse = Pulse(self._store)

        def is_wanted() -> None:
            check()
            self._refuse_if_left()
            self._refuse_if_gone(pulse)

        with self._in_use:
            self._refuse_if_left()
            self._is_meeting = True
        try:
            with AbandonableThread(is_wanted, tensor.device) as thread:
                thread.do(begin)
        except BaseException:
            with self._in_use:
                if self._is_meeting:
                    self._lose()
            raise
        self._has_met = True

    def _await_first(self, check: Callable[[], None]) -> None:
        """Wait for the first posted broadcast. Raise ``Refused`` if its trainer is gone."""
        self._refuse_if_left()
        work, _ = self._unfinished[0]
        pulse, pause_s = Pulse(self._store), FIRST_POLL_S
        while not work.is_completed():
            check()
            self._refuse_if_left()
            self._refuse_if_gone(pulse)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        self._unfinished.popleft()
        self._store_is_trainers &= not pulse.was_missed
        # NCCL's ``wait`` does not raise the errors of its watchdog
        if (failure := work.exception()) is not None:
            raise RuntimeError(f"{failure}")
        work.wait()

    def _refuse_if_gone(self, pulse: Pulse) -> None:
        if self._store_is_trainers and (why := pulse.why_gone()) is not None:
            raise Refused(f"the broadcast in group {self._name!r} will not come: {why}")

    def _refuse_if_left(self) -> None:
        if self._is_retired:
            raise Refused(f"group {self._name!r} was left: {self._broken}")

    def describe(self) -> str:
        return CONTROL_SYNC if self._broken is None else f"broken: {self._broken}"

    def _break(self, reason: str) -> None:
        self._broken = reason
        with self._in_use:
            if self._is_gone or not launches(dist.get_backend(self._group)):
                return
            self._is_gone = True
            try:
                _abort_process_group(self._group)
            except Exception:
                logger.exception("The communicator of group %r could not be aborted.", self._name)
            else:
                self._unfinished.clear()

    def _lose(self) -> None:
        """Give the group up while a thread is in its first broadcast."""
        self._is_lost = self._is_gone = True
        free_name(self._group)

    @property
    def is_waiting(self) -> bool:
        """True while a broadcast may still write into memory of this process."""
        if self._is_lost:
            return True
        return not all(work.is_completed() for work, _ in self._unfinished)

    def leave(self) -> None:
        with self._in_use:
            if self._is_gone:
                return
            if self._is_meeting:
                self._lose()
                return
            self._is_gone = True
            if self.is_waiting:
                # destroying would wait for the broadcast, and so would the object's destructor
                _abort_process_group(self._group)
            else:
                dist.destroy_process_group(self._group)


class Groups:
    """The groups of one rank, by name.

    The staging thread receives in groups and leaves them. The thread of a ``Rendezvous`` forms a
    group, and first leaves an old group of the same name. ``_lock`` guards the tables.
    """

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        """``timeout_s`` limits a rendezvous; ``device`` is the device of received tensors."""
        self._timeout_s = timeout_s
        self._device = device
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._joining: dict[str, Rendezvous] = {}
        # number of calls being received or queued, by the group's name
        self._transfers: Counter[str] = Counter()
        # groups left during a broadcast: they keep threads and sockets until their trainer dies
        self._left: list[Group] = []

    def get(self, name: str) -> Group:
        with self._lock:
            if name in self._groups:
                return self._groups[name]
            known = ", ".join(map(repr, self._groups)) or "none"
        raise Refused(
            f"group_name {name!r} is not known (there is {known}): call "
            "/init_weights_update_group first"
        )

    def begin_transfer(
        self,
        source: DistributedSource,
        expected: Callable[[], Iterator[tuple[torch.Tensor, Any]]] | None,
    ) -> None:
        """Take a call in, on the loop's thread; ``end_transfer`` follows on the staging thread.

        ``expected`` returns the buffers for the call's broadcasts. With None the loop posts none.
        """
        with self._lock:
            self._transfers[source.group_name] += 1
            is_alone = self._transfers[source.group_name] == 1
            group = self._groups.get(source.group_name)
        if group is None or expected is None or not is_alone:
            return
        group.post_ahead(source.transfer_id, expected)

    def end_transfer(self, source: DistributedSource) -> None:
        with self._lock:
            group = self._groups.get(source.group_name)
        if group is not None:
            group.forget_ahead(source.transfer_id)
        with self._lock:
            self._transfers[source.group_name] -= 1

    def join(self, call: JoinGroupCall, answers: AnswerChannel) -> None:
        """Begin a rendezvous with the trainer. ``call`` is answered at the rendezvous' end.

        Every rank of every replica and stage has its own number in the group:

        rank = rank_offset + (dp_rank · pp_size + pp_rank) · tp_size + tp_rank

        A group of the same name is replaced if its trainer is gone or out of step. A running
        rendezvous of the same name is given up.
        """
        rank = call.rank_offset + own_index()
        if not 0 < rank < call.world_size:
            raise Refused(
                f"world_size {call.world_size} with rank_offset {call.rank_offset} has no place "
                f"for this rank, which would be rank {rank}"
            )

        def end(outcome: Formed | Exception) -> None:
            with self._lock:
                if self._joining.get(name) is meeting:
                    del self._joining[name]
                if not isinstance(outcome, Exception):
                    self._groups[name] = Group(name, outcome, call.call_id)
            if isinstance(outcome, Exception):
                answers.fail(call, outcome)
            else:
                answers.succeed(call, Done())

        name = call.group_name
        meeting = Rendezvous(
            call,
            rank,
            self._timeout_s,
            self._device,
            retire_useless=lambda: self._retire_useless(name),
            on_end=end,
            discard=lambda formed: _abort_process_group(formed.group),
        )
        self.stop_joining(name, "a newer call joins under this name")
        with self._lock:
            self._joining[name] = meeting
        meeting.start()

    def stop_joining(self, name: str, reason: str, join_id: str | None = None) -> None:
        """Give up the rendezvous of ``name``, or only the one with ``join_id`` if given."""
        with self._lock:
            meeting = self._joining.get(name)
            if meeting is None or join_id not in (None, meeting.join_id):
                return
            del self._joining[name]
        meeting.give_up(reason)

    def leave(self, name: str, join_id: str | None = None) -> None:
        group = self.get(name)
        if join_id not in (None, group.join_id):
            return
        with self._lock:
            if self._groups.get(name) is not group:
                # replaced meanwhile
                return
            del self._groups[name]
        group.leave()
        self._keep_while_waiting(group)

    def give_up(self, call: GiveUpTransferCall) -> bool:
        """Return whether the call's group exists and is broken now."""
        with self._lock:
            group = self._groups.get(call.group_name)
        return group is not None and group.give_up(call.transfer_id, call.reason)

    def _retire_useless(self, name: str) -> None:
        """Retire a useless group of this name, on a rendezvous' thread: torch has unique names."""
        with self._lock:
            group = self._groups.get(name)
        if group is None:
            return
        if group.is_of_use():
            raise Refused(f"group_name {name!r} is taken: destroy that group first")
        with self._lock:
            if self._groups.get(name) is group:
                del self._groups[name]
        group.retire("a newer group takes its name")
        self._keep_while_waiting(group)

    def _keep_while_waiting(self, group: Group) -> None:
        with self._lock:
            self._left = [left for left in (*self._left, group) if left.is_waiting]

    def describe(self) -> dict[str, str]:
        """Return the state of each group and rendezvous, by name."""
        with self._lock:
            known: dict[str, Group | Rendezvous] = {**self._groups, **self._joining}
        return {name: each.describe() for name, each in known.items()}
