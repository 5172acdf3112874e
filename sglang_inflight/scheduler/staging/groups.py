"""Process groups with trainers, from which a rank receives broadcasts."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.network import NetworkAddress
from torch.distributed.distributed_c10d import _abort_process_group

from sglang_inflight.errors import Refused
from sglang_inflight.messages import GiveUpTransferCall, JoinGroupCall
from sglang_inflight.scheduler.staging.process_group import form_group, is_nccl

logger = logging.getLogger(__name__)

# asking takes the interpreter from the loop for a moment, so not too often
POLL_S = 0.005


class Group:
    """One process group in which the trainer is rank 0.

    A broadcast is waited for by asking, not by blocking, so that a trainer that dies or
    stops costs its own update and nothing else. NCCL's runs on the device until its data come,
    and what waits for the whole device, such as giving memory back, would wait with it. So
    one that is given up is ended, and its group with it.

    Broadcasts carry no name: the next one received is the next one sent. So a group is out
    of step with its trainer after a broadcast that did not end, and after a call that was
    refused before all of its broadcasts were taken in, because what is left of them would
    be the next update's. It is broken then, and every later use is refused.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._name = name
        self._group = group
        self._broken: str | None = None
        # the last transfer of which every broadcast was taken in
        self._taken: str | None = None
        # a broadcast that is awaited, or was given up, and what it may still write
        self._unfinished: tuple[dist.Work, torch.Tensor] | None = None
        self._aborted = False

    def note_taken(self, transfer_id: str) -> None:
        self._taken = transfer_id

    def give_up(self, transfer_id: str | None, reason: str) -> bool:
        """A call failed. Returns whether the group is out of step with its trainer now."""
        if self._broken is None and (transfer_id is None or transfer_id != self._taken):
            self._broken = f"what its trainer broadcast for a refused call is still in it: {reason}"
        return self._broken is not None

    def receive(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Fill ``tensor`` with the trainer's next broadcast.

        Raises whatever ``check`` raises while nothing comes (dropped, out of time), and
        ``Refused`` where the trainer is gone.
        """
        if self._broken is not None:
            raise Refused(
                f"group {self._name!r} is broken ({self._broken}): destroy it and join anew"
            )
        try:
            work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
            assert work is not None
            self._unfinished = work, tensor
            while not work.is_completed():
                check()
                time.sleep(POLL_S)
            self._unfinished = None
            # NCCL's wait says nothing of what its watchdog saw
            if (failure := work.exception()) is not None:
                raise RuntimeError(f"{failure}")
            work.wait()
        except Refused as error:
            self._break(f"{error}")
            raise
        except Exception as error:
            reason = f"{error}".split("\n")[0]
            self._break(reason)
            raise Refused(
                f"the trainer's broadcast in group {self._name!r} failed: {reason}"
            ) from error

    def _break(self, reason: str) -> None:
        self._broken = reason
        if not is_nccl(dist.get_backend(self._group)):
            return
        self._aborted = True
        try:
            _abort_process_group(self._group)
        except Exception:
            logger.exception("The communicator of group %r could not be ended.", self._name)
        else:
            self._unfinished = None

    @property
    def is_waiting(self) -> bool:
        """Whether a broadcast may still write into memory of this process."""
        return self._unfinished is not None and not self._unfinished[0].is_completed()

    def leave(self) -> None:
        if self._aborted:
            return
        if self.is_waiting:
            # destroying waits for what may never come, and so does the object's end
            _abort_process_group(self._group)
        else:
            dist.destroy_process_group(self._group)


class Groups:
    """The groups of one rank, by name. Used on the staging thread only."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[str, Group] = {}
        # left while they waited: with their threads and sockets until their trainer dies
        self._left: list[Group] = []

    def get(self, name: str) -> Group:
        if name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise Refused(
                f"group_name {name!r} is not known (there is {known}): call "
                "/init_weights_update_group first"
            )
        return self._groups[name]

    def join(self, call: JoinGroupCall) -> None:
        """Meet the trainer. Replicas and stages count on, so every rank has its own number.

        rank = rank_offset + (dp_rank · pp_size + pp_rank) · tp_size + tp_rank
        """
        self._forget_left()
        if call.group_name in self._groups:
            raise Refused(f"group_name {call.group_name!r} is taken: destroy that group first")
        rank = call.rank_offset + own_index()
        if not 0 < rank < call.world_size:
            raise Refused(
                f"world_size {call.world_size} with rank_offset {call.rank_offset} leaves no "
                f"place for rank {rank}"
            )
        address = NetworkAddress(call.master_address, call.master_port)
        try:
            group = form_group(
                call.backend,
                address.to_tcp(),
                name=call.group_name,
                rank=rank,
                world_size=call.world_size,
                timeout=self._timeout,
            )
        except Exception as error:
            raise Refused(
                f"group {call.group_name!r} at {address.to_tcp()} was not formed: {error}"
            ) from error
        self._groups[call.group_name] = Group(call.group_name, group)

    def leave(self, name: str) -> None:
        self._forget_left()
        group = self.get(name)
        del self._groups[name]
        group.leave()
        if group.is_waiting:
            self._left.append(group)

    def _forget_left(self) -> None:
        self._left = [group for group in self._left if group.is_waiting]

    def give_up(self, call: GiveUpTransferCall) -> bool:
        """Whether there is such a group, and it is broken now."""
        group = self._groups.get(call.group_name)
        return group is not None and group.give_up(call.transfer_id, call.reason)


def own_index() -> int:
    """This rank's place among all ranks of all replicas."""
    parallel = get_parallel()
    replica = 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0
    stage: int = replica * parallel.pp_size + parallel.pp_rank
    index: int = stage * parallel.tp_size + parallel.tp_rank
    return index
