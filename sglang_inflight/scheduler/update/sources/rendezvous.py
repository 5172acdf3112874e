"""Meeting one trainer: on a thread of its own, because it waits for somebody else."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable

import torch
from sglang.srt.utils.network import NetworkAddress

from sglang_inflight.errors import Refused
from sglang_inflight.messages import JoinGroupCall
from sglang_inflight.scheduler.update.sources.process_group import Formed, form_group
from sglang_inflight.scheduler.update.sources.stateless_group import StatelessRendezvous
from sglang_inflight.threads import start_thread

# between two looks whether the trainer listens
LOOK_S = 0.05
CONNECT_S = 1.0


class Rendezvous:
    """Forms one process group, or is given up, whichever comes first.

    Torch can neither be asked how far it is nor be interrupted, and it tries twice for as long
    as it is allowed to. So first the trainer is waited for by asking whether it listens, which
    can be given up at any moment; and the time limit is kept by a timer, not by torch. What
    torch forms after the end is handed to ``discard``.

    ``_lock`` guards the one decision, how it ended: the thread, the timer and whoever gives it
    up may come to it at once, and the first one counts. ``on_end`` is called once, outside of
    the lock, by the thread that came first.
    """

    def __init__(
        self,
        call: JoinGroupCall,
        rank: int,
        timeout_s: float,
        device: torch.device,
        *,
        make_way: Callable[[], None],
        on_end: Callable[[Formed | Exception], None],
        discard: Callable[[Formed], None],
    ) -> None:
        """``make_way`` is called first, on the thread; what it raises ends the rendezvous."""
        self._call = call
        self._rank = rank
        self._timeout_s = timeout_s
        self._device = device
        self._make_way = make_way
        self._on_end = on_end
        self._discard = discard
        self._address = NetworkAddress(call.master_address, call.master_port)
        self._lock = threading.Lock()
        self._has_ended = False
        # what has not happened yet; the thread alone writes it
        self._lacks = "nobody came"

    @property
    def join_id(self) -> str:
        return self._call.call_id

    def start(self) -> None:
        """Its outcome is told to ``on_end``, also that there is no thread for it."""
        try:
            start_thread(self._run, name="inflight-rendezvous")
        except Refused as refused:
            self._end(refused)

    def describe(self) -> str:
        return f"waiting for its trainer: {self._lacks}"

    def give_up(self, reason: str) -> None:
        self._end(self._refusal(reason))

    def _run(self) -> None:
        timer = threading.Timer(self._timeout_s, self._give_up_waiting)
        timer.daemon = True
        timer.start()
        try:
            self._make_way()
            self._wait_until_the_trainer_listens()
            if self._has_ended:
                return
            formed = self._form()
        except Refused as refused:
            self._end(refused)
        except Exception as error:
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
                time.sleep(LOOK_S)

    def _form(self) -> Formed:
        self._lacks = "somebody listened there, and not every rank came"
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
        met = StatelessRendezvous(
            self._call.master_address,
            self._call.master_port,
            rank=self._rank,
            world_size=self._call.world_size,
            timeout=datetime.timedelta(seconds=self._timeout_s),
        )
        self._lacks = (
            "somebody listens there and left no NCCL id, as vLLM's trainers do when all ranks have "
            "come (one that meets through torch.distributed says so: rendezvous 'torch')"
        )
        unique_id = met.read_unique_id()
        self._lacks = "not every rank formed it"
        return met.form(self._call.backend, self._call.group_name, unique_id, self._device)

    def _give_up_waiting(self) -> None:
        self.give_up(f"{self._lacks} within {self._timeout_s:g} s")

    def _end(self, outcome: Formed | Exception) -> bool:
        """Whether this is how it ended."""
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
