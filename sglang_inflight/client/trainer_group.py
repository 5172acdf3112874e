"""A process group in which a trainer is rank 0 and the ranks of its servers are the others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore, Work

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")

# how long a broadcast that was given up may take to fail, once its receivers have left
FAILS_S = 2.0
POLL_S = 0.001
# the device under whose name torch keeps a backend's addresses
_DEVICE = {"gloo": "cpu", "nccl": "cuda"}

# gloo's, each with a broadcast that no one receives: to free one is to wait for its receivers
_stuck: list[TrainerGroup] = []


class TrainerGroup:
    """Listens from the start; ``form`` meets the ranks, ``broadcast`` sends, ``leave`` ends it.

    It is made of torch's backends alone. So it is not in torch's table of groups, where a
    trainer has its own and each name is there once; and no variable of ``torchrun`` decides
    whose store it meets in.

    Belongs to one thread. What can block in torch without an end runs in threads that can be
    left behind: forming, and the begin of NCCL's first broadcast, which connects. They end
    when the group is left: a connection is made through the store, which ends then.
    """

    def __init__(self, name: str, ranks: int, *, backend: Backend, timeout_s: float) -> None:
        """``ranks`` are those of the servers. ``timeout_s`` is how long forming may take."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._size = 1 + ranks
        self._backend: Backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        here = "127.0.0.1"
        self._master: TCPStore | None = TCPStore(
            here, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self.port: int = self._master.port
        # not the master itself: what is stuck in torch would keep that listening
        self._store: Store = TCPStore(
            here, self.port, wait_for_workers=False, timeout=self._timeout
        )
        for prefix in (name, f"{name}/", f"{_DEVICE[backend]}/"):
            self._store = PrefixStore(prefix, self._store)
        # of one of torch's classes, which have no types
        self._formed: Any = None
        self._work: Work | None = None

    def address_for(self, server: str) -> str:
        """The address of this machine as the server at that URL reaches it."""
        url = urlsplit(server)
        port = url.port or (443 if url.scheme == "https" else 80)
        family, kind, _, _, where = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_DGRAM)[
            0
        ]
        # nothing is sent: this asks the routing table
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address: str = probe.getsockname()[0]
        return address

    def form(self) -> Future[None]:
        """Done when every rank has come."""

        def meet() -> None:
            import torch.distributed as dist

            if self._backend == "gloo":
                self._formed = dist.ProcessGroupGloo(self._store, 0, self._size, self._timeout)
                return
            options = dist.ProcessGroupNCCL.Options()
            # whoever waits for a broadcast sets the limit: NCCL's own ends the process
            options._timeout = NEVER
            with errors_cost_the_group_only():
                self._formed = dist.ProcessGroupNCCL(self._store, 0, self._size, options)

        return _in_thread(meet)

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Begin to send. Call what is returned until it says that the tensor was sent.

        It raises ``RuntimeError`` where that failed. The tensor must stay as it is until
        then, and so must whatever fills it on the current stream.
        """
        begun = _in_thread(self._begin(tensor))

        def is_sent() -> bool:
            if not begun.done() or not begun.result().is_completed():
                return False
            work = begun.result()
            # NCCL's wait says nothing of what its watchdog saw; gloo's raises, as it should
            if self._backend == "nccl" and (failure := work.exception()) is not None:
                raise RuntimeError(f"{failure}")
            work.wait()
            return True

        return is_sent

    def _begin(self, tensor: torch.Tensor) -> Callable[[], Work]:
        import torch
        import torch.distributed as dist

        assert self._formed is not None
        group, options = self._formed, dist.BroadcastOptions()
        options.rootRank = 0
        # of this thread: another one has streams of its own
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def begin() -> Work:
            with torch.cuda.stream(stream):
                self._work = group.broadcast([tensor], options)
            return self._work

        return begin

    def leave(self) -> None:
        """End it, whatever goes on in it. The ranks should have left before: they need not."""
        self._master = None
        if self._formed is None:
            return
        if self._backend == "nccl":
            self._formed.abort()
        elif not self._is_quiet():
            _stuck.append(self)

    def _is_quiet(self) -> bool:
        deadline = time.monotonic() + FAILS_S
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _in_thread(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="inflight-sender", daemon=True).start()
    return future
