"""Forms a group with one trainer, on a thread of its own, because it waits for the trainer."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable

import torch
from sglang.srt.utils.network import NetworkAddress

from sglang_inflight.messages import JoinGroupCall
from sglang_inflight.scheduler.groups.process_group import Formed, form_group
from sglang_inflight.scheduler.groups.stateless_group import form_stateless_group
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Refused

# pause between two attempts to connect to the trainer
POLL_S = 0.05
CONNECT_S = 1.0


class Rendezvous:
    """Forms one process group, or is given up, whichever comes first.

    Torch's rendezvous can neither be polled nor interrupted, and takes twice its own timeout. So
    the thread first polls whether the trainer listens, and can be given up at any moment. A timer
    keeps the time limit, not torch: where the timer's thread is late, torch's own limit may end
    the wait first, and counts as the timer's. A group formed after the end is passed to
    ``discard``.

    ``_lock`` guards one decision, the outcome. The thread, the timer and a caller of ``give_up``
    may decide at once, and the first one counts. That thread calls ``on_end``, once and outside
    of the lock.
    """

    def __init__(
        self,
        call: JoinGroupCall,
        rank: int,
        timeout_s: float,
        device: torch.device,
        *,
        retire_useless: Callable[[], None],
        on_end: Callable[[Formed | Exception], None],
        discard: Callable[[Formed], None],
    ) -> None:
        """``retire_useless`` is called first, on the thread; its errors end the rendezvous."""
        self._call = call
        self._rank = rank
        self._timeout_s = timeout_s
        self._device = device
        self._retire_useless = retire_useless
        self._on_end = on_end
        self._discard = discard
        self._address = NetworkAddress(call.master_address, call.master_port)
        self._lock = threading.Lock()
        self._has_ended = False
        # what the rendezvous still waits for; only the thread writes it
        self._lacks = "nobody came"

    @property
    def join_id(self) -> str:
        return self._call.call_id

    def start(self) -> None:
        """Start the thread. ``on_end`` gets the outcome, even if no thread can start."""
        try:
            start_thread(self._run, name="inflight-rendezvous")
        except Refused as refused:
            self._end(refused)

    def describe(self) -> str:
        return f"waiting for its trainer: {self._lacks}"

    def give_up(self, reason: str) -> None:
        self._end(self._refusal(reason))

    def _run(self) -> None:
        ends_at = time.monotonic() + self._timeout_s
        timer = threading.Timer(self._timeout_s, self._give_up_waiting)
        timer.daemon = True
        timer.start()
        try:
            self._retire_useless()
            self._wait_until_the_trainer_listens()
            if self._has_ended:
                return
            formed = self._form()
        except Refused as refused:
            self._end(refused)
        except Exception as error:
            if time.monotonic() >= ends_at:
                self._give_up_waiting()
            else:
                self._end(self._refusal(f"{error}"))
        else:
            if not self._end(formed):
                self._discard(formed)
        finally:
            timer.cancel()

    def _wait_until_the_trainer_listens(self) -> None:
        where = (self._call.master_address, self._call.master_port)
        while not self._has_ended:
            try:
                socket.create_connection(where, timeout=CONNECT_S).close()
                return
            except socket.gaierror:
                raise
            except OSError:
                time.sleep(POLL_S)

    def _form(self) -> Formed:
        self._lacks = "the trainer's port was open, but not every rank of the group came"
        if self._call.rendezvous == "stateless":
            return self._form_stateless()
        return form_group(
            self._call.backend,
            self._address.to_tcp(),
            name=self._call.group_name,
            rank=self._rank,
            world_size=self._call.world_size,
            timeout=datetime.timedelta(seconds=self._timeout_s),
        )

    def _form_stateless(self) -> Formed:
        self._lacks = (
            "the trainer's port is open, but its store has no NCCL id: vLLM's trainers leave one "
            "when all ranks have come (for a trainer with torch.distributed, pass rendezvous "
            "'torch')"
        )
        return form_stateless_group(
            self._call.backend,
            self._call.master_address,
            self._call.master_port,
            name=self._call.group_name,
            rank=self._rank,
            world_size=self._call.world_size,
            timeout=datetime.timedelta(seconds=self._timeout_s),
            device=self._device,
            on_id=self._note_id,
        )

    def _note_id(self) -> None:
        self._lacks = "not every rank formed the group"

    def _give_up_waiting(self) -> None:
        self.give_up(f"{self._lacks} within {self._timeout_s:g} s")

    def _end(self, outcome: Formed | Exception) -> bool:
        """Return whether ``outcome`` came first, and report it then."""
        with self._lock:
            if self._has_ended:
                return False
            self._has_ended = True
        self._on_end(outcome)
        return True

    def _refusal(self, reason: str) -> Refused:
        return Refused(
            f"group {self._call.group_name!r} at {self._address.to_tcp()} was not formed: {reason}"
        )
