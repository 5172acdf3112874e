"""Forms process groups with trainers; a failing group cannot end this server.

While a broadcast is awaited, ``Pulse`` asks whether its trainer is still there.
"""

from __future__ import annotations

import datetime
import queue
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from torch._C._distributed_c10d import PrefixStore, Store, _unregister_process_group
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import rendezvous

from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only
from sglang_inflight.threads import start_thread

# CTAs of the device held by a broadcast while it waits for its trainer. NCCL would hold 8 to 32.
# Then a forward's kernels needing the whole device at once would wait for the trainer. So would the
# forward's all-reduce on another rank, whose broadcast may wait behind it. NCCL uses the smallest
# number asked for by any rank of the group.
#
# NCCL_LAUNCH_ORDER_IMPLICIT is left to the user: it would slow down each collective of a forward,
# and NCCL would then treat launches from two threads as an error.
MAX_CTAS = 2
# time for one answer of a trainer, in ``answers``
ANSWERS_S = 2.0
# pause between questions, and the longest silence while a broadcast is awaited: a trainer stopped
# for a moment, or far away, loses nothing
ASK_EVERY_S = 2.0
SILENT_S = 20.0
# time for a broadcast after the store's end: a process other than the trainer may have kept it
GRACE_S = 10.0
# backends whose collectives run on the host
_ON_HOST = frozenset({"gloo", "mpi"})


class Formed(NamedTuple):
    """A group, and the trainer's store for its rendezvous. The store ends with the trainer."""

    group: dist.ProcessGroup
    store: Store


def is_nccl(backend: str) -> bool:
    """Return whether NCCL is the backend, or one of several for kinds of devices."""
    return "nccl" in backend


def launches(backend: str) -> bool:
    """Return whether a collective is a launch on a device, as NCCL's are, and outlasts its call.

    ``backend`` may name one for each kind of device.
    """
    return any(each.rpartition(":")[2] not in _ON_HOST for each in backend.split(","))


def form_group(
    backend: str,
    init_method: str,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
) -> Formed:
    """Form a group like SGLang and its trainers. ``timeout`` limits the rendezvous."""
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group = construct(
        backend,
        PrefixStore(name, store),
        name=name,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if launches(backend):
        last_for_ever(group)
    return Formed(group, store)


def construct(
    backend: str,
    store: Store,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
) -> dist.ProcessGroup:
    """Construct a group with a watchdog that aborts the communicator only.

    NCCL's own watchdog ends the process after a failed broadcast, or one beyond the group's
    timeout. Here the trainer has failed: that may cost its update, but not the requests.

    Other backends have no watchdog, and wait here for their peers: there may be many at once.
    """
    with errors_cost_the_group_only() if launches(backend) else nullcontext():
        return init_custom_process_group(
            backend=backend,
            store=store,
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            group_name=name,
            pg_options=_nccl_options(timeout) if backend == "nccl" else None,
        )


def _nccl_options(timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # torch warns about a timeout other than the group's
    options._timeout = timeout
    options.config.max_ctas = MAX_CTAS
    return options


def last_for_ever(group: dist.ProcessGroup) -> None:
    """Set no timeout for NCCL's watchdog: the waiting thread limits a broadcast itself."""
    dist.set_timeout(NEVER, group)


def free_name(group: dist.ProcessGroup) -> None:
    """Free the name of ``group`` for another group, without destroying or aborting ``group``."""
    _world.pg_map.pop(group, None)
    name = _world.pg_names.pop(group, None)
    if name is not None:
        _unregister_process_group(name)


class Pulse:
    """Asks the store of one trainer's group; the store ends with the trainer.

    A thread of its own asks each question, and is abandoned without an answer: the store's socket
    has no timeout, and a stopped process does not answer. There is one question at a time. Only
    one thread uses this object.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answer: queue.SimpleQueue[bool] | None = None
        # time of the open question, and of the next one
        self._asked = 0.0
        self._ask_at = time.monotonic() + ASK_EVERY_S
        # when the store was first seen to have ended
        self._ended: float | None = None

    @property
    def was_missed(self) -> bool:
        """True if the store has ended. A broadcast after that proves the store useless as a sign
        of its trainer's life.
        """
        return self._ended is not None

    def answers(self) -> bool:
        """Return whether an answer comes within ``ANSWERS_S``."""
        try:
            return self._ask().get(timeout=ANSWERS_S)
        except queue.Empty:
            return False

    def why_gone(self) -> str | None:
        """Return why no broadcast will come, or None. Waits for nothing; call it often."""
        now = time.monotonic()
        if self._ended is not None:
            return "its trainer has ended" if now - self._ended > GRACE_S else None
        if self._answer is None:
            if now >= self._ask_at:
                self._answer, self._asked = self._ask(), now
            return None
        try:
            is_there = self._answer.get_nowait()
        except queue.Empty:
            silent = now - self._asked
            return f"its trainer was silent for {silent:.0f} s" if silent > SILENT_S else None
        self._answer, self._ask_at = None, now + ASK_EVERY_S
        self._ended = None if is_there else now
        return None

    def _ask(self) -> queue.SimpleQueue[bool]:
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def ask() -> None:
            try:
                self._store.check(["inflight"])
            except RuntimeError:
                answer.put(False)
            else:
                answer.put(True)

        start_thread(ask, name="inflight-ask-trainer")
        return answer
