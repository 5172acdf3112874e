"""A scheduler's one context of ZeroMQ for what we send and receive.

libzmq starts a context's threads with its first socket, and aborts the process where no file
descriptor is left for them. So there is one context, whose threads start when the scheduler does.
A later socket that finds none raises ``zmq.ZMQError``.
"""

from __future__ import annotations

import functools
from typing import Any

import zmq


@functools.cache
def zmq_context() -> zmq.Context[Any]:
    """For any thread. Its sockets belong to those who make them."""
    context: zmq.Context[Any] = zmq.Context(1)
    context.socket(zmq.PAIR).close()
    return context
