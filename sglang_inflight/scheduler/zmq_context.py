"""A scheduler's one ZeroMQ context for our sockets.

libzmq starts a context's threads with its first socket. Without a free file descriptor for them it
aborts the process. So there is one context, and its threads start with the scheduler. A later
socket without a file descriptor only raises ``zmq.ZMQError``.
"""

from __future__ import annotations

import functools
from typing import Any

import zmq


@functools.cache
def zmq_context() -> zmq.Context[Any]:
    """Return the context, for any thread. A socket belongs to the thread that makes it."""
    context: zmq.Context[Any] = zmq.Context(1)
    context.socket(zmq.PAIR).close()
    return context
