"""Transports a rank's replies to the front end, on the first node."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import msgspec
import zmq
from sglang.srt.managers.io_struct import BaseReq, sock_send
from sglang.srt.utils.network import get_zmq_socket, is_zmq_endpoint_ipv6

from sglang_inflight.messages import Pulse
from sglang_inflight.scheduler.collectives import broadcast_from_first_rank_of_all
from sglang_inflight.scheduler.nodes.relay import FRAME_BYTES, Relay
from sglang_inflight.scheduler.zmq_context import zmq_context
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.topology import own_rank

# time between two pulses of a rank on another node
PULSE_S = 1.0


class ReplyTransport(Protocol):
    """Any thread of the rank may send."""

    def send(self, message: BaseReq) -> None: ...


def find_reply_transport(ipc_name: str) -> ReplyTransport:
    """Return this rank's transport. Only ranks of the first node can connect to ``ipc_name``.

    With several nodes this is a collective over all ranks of the replica, on the scheduler's
    thread. So the first rank's key reaches the others by SGLang's private connections.
    """
    parallel = get_parallel()
    if parallel.nnodes == 1:
        return LocalReplies(ipc_name)
    group = parallel.world_group
    relay: list[str | bytes] = []
    if group.rank == group.ranks[0]:
        relay = [*Relay.start(ipc_name)]
    endpoint, key = broadcast_from_first_rank_of_all(relay)
    if parallel.node_rank == 0:
        return LocalReplies(ipc_name)
    assert isinstance(endpoint, str)
    assert isinstance(key, bytes)
    return RemoteReplies(endpoint, key)


class LocalReplies:
    """Replies from the front end's own node.

    The scheduler's thread and the staging thread both send. A zmq socket may move between
    threads only through a full memory fence: the lock is one.
    """

    def __init__(self, ipc_name: str) -> None:
        self._socket: Any = get_zmq_socket(zmq_context(), zmq.PUSH, ipc_name, False)
        self._lock = threading.Lock()

    def send(self, message: BaseReq) -> None:
        with self._lock:
            sock_send(self._socket, message)


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
