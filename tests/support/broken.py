"""A server that answers wrongly, or not at all: what a network and what stands in it can do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OK = (200, b"{}")


class BrokenServer:
    """Answers each path as it was told to, and else ``{}``."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        # paths that are not answered for now
        self._silent: set[str] = set()
        # the path of each request that arrived here
        self.arrivals: list[str] = []
        self._changed = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def fall_silent(self, *paths: str) -> None:
        with self._changed:
            self._silent.update(paths)

    def speak(self) -> None:
        """Answer everything, what has arrived so far too."""
        with self._changed:
            self._silent.clear()
            self._changed.notify_all()

    def wait_for(self, path: str, count: int = 1) -> None:
        """Until ``count`` requests to ``path`` have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.arrivals.count(path) >= count, 60)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with server._changed:
                    server.arrivals.append(self.path)
                    server._changed.notify_all()
                    server._changed.wait_for(lambda: self.path not in server._silent)
                status, content = server.answers.get(self.path, OK)
                # whoever has given up is not there to hear it
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    @contextlib.contextmanager
    def serving(self) -> Iterator[BrokenServer]:
        serve = threading.Thread(
            target=self._http.serve_forever, args=(0.02,), name="broken", daemon=True
        )
        serve.start()
        try:
            yield self
        finally:
            self.speak()
            self._http.shutdown()
            self._http.server_close()
