"""A server with wrong answers or none, in place of a faulty network or proxy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from sglang_inflight.vocabulary.answers import (
    Answer,
    Begun,
    Capabilities,
    Grant,
    RankReceipt,
    RankStatus,
    Receipt,
    Release,
    StagedSoFar,
    StagingStatus,
    Status,
)
from sglang_inflight.vocabulary.version import VERSION

_RECEIPT = Receipt(
    message="ok",
    weight_version="v1",
    base_version="v0",
    epoch=1,
    staged_s=1.0,
    stall_ms=1.0,
    bytes=1,
    tensors=1,
    retracted=0,
    ranks=(RankReceipt(dp_rank=0, tp_rank=0, pp_rank=0, digest="d"),),
)
_STAGED = StagedSoFar(message="ok", weight_version="v0", staged_s=1.0, bytes=1, tensors=1)
_STATE: dict[str, Any] = {
    "state": "running",
    "paused": False,
    "mode": None,
    "holders": (),
    "running": 0,
    "waiting": 0,
    "weight_version": "v0",
    "epoch": 0,
    "digest": None,
    "previous_version": None,
    "staging": StagingStatus(
        mode="device",
        state="empty",
        update_id=None,
        tensors=0,
        bytes=0,
        can_roll_back=False,
        dirty=None,
        refusal=None,
        groups={},
    ),
}
# a healthy server's answers
WELL: dict[str, Answer] = {
    "/inflight/status": Status(
        **_STATE,
        inflight_version=VERSION,
        capabilities=Capabilities(),
        ranks=(RankStatus(**_STATE, dp_rank=0, tp_rank=0, pp_rank=0),),
    ),
    "/pause_generation": Grant(mode="abort", pause_id="p", weight_version="v0", ranks=()),
    "/continue_generation": Release(message="ok", paused=False),
    "/begin_weight_update": Begun(message="ok", session_id="s"),
    "/seal_weight_update": _STAGED,
    "/end_weight_update": _RECEIPT,
    "/update_weights_from_disk": _RECEIPT,
    "/inflight/rollback": _RECEIPT,
}


class BrokenServer:
    """A server with set answers for some paths, and a healthy server's for all others."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        # Content-Type by path
        self.types: dict[str, str] = {}
        # paths with endless answers
        self.endless: set[str] = set()
        # paths without an answer for now
        self._silent: set[str] = set()
        # path of each request so far
        self.arrivals: list[str] = []
        self._changed = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def fall_silent(self, *paths: str) -> None:
        with self._changed:
            self._silent.update(paths)

    def speak(self) -> None:
        """Answer all requests, waiting ones included."""
        with self._changed:
            self._silent.clear()
            self._changed.notify_all()

    def wait_for(self, path: str, count: int = 1) -> None:
        """Wait until ``count`` requests to ``path`` have arrived."""
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
                well = (200, msgspec.json.encode(WELL.get(self.path, {})))
                status, content = server.answers.get(self.path, well)
                # a client may have given up and gone
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    if self.path in server.types:
                        self.send_header("Content-Type", server.types[self.path])
                    if self.path in server.endless:
                        self.send_header("Connection", "close")
                        self.end_headers()
                        while True:
                            self.wfile.write(content)
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
