"""A proxy that can lose requests and answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

from harness.server import PLAIN, Server


class Proxy:
    """Forwards requests to a server, with exceptions for the next request to a path."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: dict[str, Callable[[], object]] = {}
        self._lost_answers: list[str] = []
        self._is_stopped = False
        # path of each request so far
        self.arrivals: list[str] = []
        # actions by their request's place in ``arrivals``, before and after the server had it
        self.before_arrival: dict[int, Callable[[], object]] = {}
        self.after_arrival: dict[int, Callable[[], object]] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def before(self, path: str, action: Callable[[], object]) -> None:
        """Call ``action`` at the next request to ``path``, then forward the request."""
        self._before[path] = action

    def awaits(self, path: str) -> bool:
        """Whether the action before the next request to ``path`` has not been called yet."""
        return path in self._before

    def lose_request(self, path: str) -> None:
        """Drop the next request to ``path`` before it reaches the server."""

        def lose() -> None:
            raise ConnectionAbortedError(path)

        self.before(path, lose)

    def lose_answer(self, path: str) -> None:
        """Let the server do the next request to ``path``, and drop the answer."""
        self._lost_answers.append(path)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                # a client makes one call at a time
                number = len(proxy.arrivals)
                proxy.arrivals.append(self.path)
                if proxy._is_stopped:
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                try:
                    proxy._before.pop(self.path, lambda: None)()
                    proxy.before_arrival.get(number, lambda: None)()
                    answer = proxy._forward(self.command, self.path, body)
                    proxy.after_arrival.get(number, lambda: None)()
                except (ConnectionAbortedError, httpx.HTTPError):
                    self.close_connection = True
                    return
                if self.path in proxy._lost_answers:
                    proxy._lost_answers.remove(self.path)
                    self.close_connection = True
                    return
                # a client may have given up and gone
                with contextlib.suppress(ConnectionError):
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(answer.content)))
                    self.end_headers()
                    self.wfile.write(answer.content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _forward(self, method: str, path: str, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        url = self._server.url + path
        return httpx.request(method, url, content=body, headers=headers, timeout=120, **PLAIN)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        threading.Thread(target=self._http.serve_forever, name="proxy", daemon=True).start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop accepting and answering, also on open connections."""
        self._is_stopped = True
        self._http.shutdown()
        self._http.server_close()
