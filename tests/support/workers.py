"""Connections to a chosen one of a server's tokenizer workers."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from urllib.parse import SplitResult, urlsplit

import psutil

from harness.server import Server
from tests.support.load import until


def workers(server: Server) -> list[psutil.Process]:
    """Return the processes serving HTTP, in the order of their start."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return sorted(filter(_is_worker, found), key=lambda process: process.pid)


def until_all_serve(server: Server, n: int) -> list[psutil.Process]:
    """Wait until the server's ``n`` workers answer, and return them.

    A server answers as soon as one of them does.
    """
    until(f"there are {n} workers", lambda: len(workers(server)) == n)
    all_workers = workers(server)
    for worker in all_workers:
        with via_worker(server, worker) as at_worker:
            assert at_worker.get("/inflight/status")["status_code"] == 200
    return all_workers


def _is_worker(process: psutil.Process) -> bool:
    # the process may have just ended
    with contextlib.suppress(psutil.Error):
        return "sglang::tokenizer_worker" in " ".join(process.cmdline())
    return False


@contextlib.contextmanager
def via_worker(server: Server, worker: psutil.Process) -> Iterator[Server]:
    """Yield the server with a URL whose connections all reach ``worker``."""
    relay = _Relay(server, worker)
    try:
        yield replace(server, url=relay.url)
    finally:
        relay.close()


class _Relay:
    """Forwards connections to one worker.

    Any worker may accept a connection, so the others are stopped meanwhile. Granian's workers have
    a queue each, chosen by the kernel: a connection in another worker's queue is closed and tried
    again.
    """

    def __init__(self, server: Server, worker: psutil.Process) -> None:
        self._server = server
        self._worker = worker
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # otherwise the accepting thread would keep the socket open
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        with here, contextlib.suppress(OSError), self._open() as there:
            back = threading.Thread(target=_copy, args=(there, here), daemon=True)
            back.start()
            _copy(here, there)
            back.join()

    def _open(self) -> socket.socket:
        address = urlsplit(self._server.url)
        with _LOCK, _stopped(other for other in workers(self._server) if other != self._worker):
            there = until("the worker takes a connection", lambda: self._try(address))
            assert there is not None
            return there

    def _try(self, address: SplitResult) -> socket.socket | None:
        there = socket.create_connection((address.hostname, address.port))
        port = there.getsockname()[1]
        pause = 0.002
        # each look costs the kernel a walk over its whole table of connections
        while pause < 0.5:
            if self._has(port):
                return there
            time.sleep(pause)
            pause *= 2
        there.close()
        return None

    def _has(self, port: int) -> bool:
        return not self._worker.is_running() or any(
            connection.raddr and connection.raddr.port == port
            for connection in self._worker.net_connections("tcp")
        )


# two relays stopping each other's worker would deadlock
_LOCK = threading.Lock()


@contextlib.contextmanager
def _stopped(processes: Iterable[psutil.Process]) -> Iterator[None]:
    stopped = []
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
                stopped.append(process)

                def stands(process: psutil.Process = process) -> bool:
                    return process.status() == psutil.STATUS_STOPPED

                until("the other worker stands still", stands)
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until either end is closed, then close both."""
    try:
        while part := source.recv(1 << 16):
            target.sendall(part)
    except OSError:
        pass
    finally:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
