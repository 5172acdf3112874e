"""Sends a rank's answers from another node to the relay in the replica's first rank."""

from __future__ import annotations

import threading
import time

import msgspec
import zmq
from sglang.srt.managers.io_struct import BaseReq
from sglang.srt.utils.network import is_zmq_endpoint_ipv6

from sglang_inflight.extensions.nodes.relay import FRAME_BYTES, Relay
from sglang_inflight.messages import Pulse
from sglang_inflight.scheduler.answers import TRANSPORTS, LocalReplies, ReplyTransport, zmq_context
from sglang_inflight.scheduler.collectives import broadcast_from_first_rank_of_all
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.topology import own_placement, own_rank

# time between two pulses of a rank on another node
PULSE_S = 1.0


@TRANSPORTS.join()
def find_transport(ipc_name: str) -> ReplyTransport | None:
    """Return this rank's transport on a server of several nodes.

    A collective over all ranks of the replica, on the scheduler's thread. So the first rank's key
    reaches the others by SGLang's private connections.
    """
    placement = own_placement()
    if not placement.has_other_nodes:
        return None
    group = get_parallel().world_group
    relay: list[str | bytes] = []
    if group.rank == group.ranks[0]:
        relay = [*Relay.start(ipc_name)]
    endpoint, key = broadcast_from_first_rank_of_all(relay)
    if placement.is_with_front_end:
        return LocalReplies(ipc_name)
    assert isinstance(endpoint, str)
    assert isinstance(key, bytes)
    return RemoteReplies(endpoint, key)


class RemoteReplies:
    """Replies from another node, over TCP to the relay in the replica's first rank.

    A thread sends a pulse every second, so that the first node can tell a dead rank from an idle
    one. The pulse thread shares the socket under the lock.
    """

    def __init__(self, endpoint: str, key: bytes) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = zmq_context().socket(zmq.PUSH)
        # no limit on queued messages: a dead first node must not block this node's loop
        self._socket.sndhwm = 0
        self._socket.ipv6 = is_zmq_endpoint_ipv6(endpoint)
        self._socket.curve_serverkey = key
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        threading.Thread(target=self._send_pulses, name="pulse", daemon=True).start()

    def send(self, message: BaseReq) -> None:
        content = self._encode(message)
        frames = [content[at : at + FRAME_BYTES] for at in range(0, len(content), FRAME_BYTES)]
        with self._lock:
            self._socket.send_multipart(frames)

    def _send_pulses(self) -> None:
        dp_rank, pp_rank, tp_rank = own_rank()
        pulse = Pulse(dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)
        while True:
            self.send(pulse)
            time.sleep(PULSE_S)
