"""A real SGLang server in processes of its own, and calls to it."""

from __future__ import annotations

import collections
import contextlib
import errno
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from sglang.srt.utils.network import get_free_port_below_ephemeral

from harness.starting import Process, end, start

START_TIMEOUT_S = 600
# httpx reads certificates anew for each call, which takes longer than the call
PLAIN: dict[str, Any] = {"verify": False}

AS_USERS_DO = (str(Path(sys.executable).with_name("sglang")), "serve")
AS_USERS_DO_IN_A_FORK = ("-c", "from sglang.cli.main import main; main()", "serve")
IN_A_FORK = ("-m", "sglang.launch_server")

# servers started and not yet ended by this process
RUNNING: list[Server] = []

# the latest ports of this process; a server binds its port before so many others are asked for
_CLAIMS: collections.deque[socket.socket] = collections.deque()
_MOST_CLAIMS = 256


def for_the_answer(seconds: float) -> httpx.Timeout:
    """Return the timeout of a caller that leaves after ``seconds`` without an answer.

    Sending the call may take any time.
    """
    return httpx.Timeout(120, read=seconds)


@dataclass
class Server:
    url: str
    process: Process
    log: Path
    # headers with the --admin-api-key, if any
    headers: dict[str, str] = field(default_factory=dict)

    def post(
        self, path: str, body: Any = None, timeout: float | httpx.Timeout = 120, **kwargs: Any
    ) -> Any:
        """Return the answer's JSON at any status, with ``status_code`` added."""
        kwargs.setdefault("headers", self.headers)
        response = httpx.post(self.url + path, json=body, timeout=timeout, **PLAIN, **kwargs)
        return _read(response)

    def get(self, path: str, timeout: float = 60, **kwargs: Any) -> Any:
        kwargs.setdefault("headers", self.headers)
        return _read(httpx.get(self.url + path, timeout=timeout, **PLAIN, **kwargs))

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def _read(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = {"text": response.text}
    answer = content if isinstance(content, dict) else {"content": content}
    return {**answer, "status_code": response.status_code}


def schedulers(server: int) -> list[psutil.Process]:
    """Return the processes of a server's ranks, by the server's process id."""
    return [
        process
        for process in psutil.Process(server).children(recursive=True)
        if "sglang::scheduler" in " ".join(process.cmdline())
    ]


def free_port() -> int:
    """Return a port that no connection takes before its server binds it, seconds from now.

    Kernels hand out ports of the ephemeral range. SGLang picks its own from 22000 up, and with
    attention DP binds a few more, 233 above a server's port. Test processes that run at once claim
    ports from each other, because a test would take the server of another for its own.
    """
    while True:
        port: int = get_free_port_below_ephemeral(low=10000, high=20000)
        # ends with this process, and no file is left
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0sglang-inflight-test-port-{port}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            _CLAIMS.append(claim)
            if len(_CLAIMS) > _MOST_CLAIMS:
                _CLAIMS.popleft().close()
            return port


@contextlib.contextmanager
def serve(
    model: Path,
    *flags: str,
    log: Path,
    env: dict[str, str] | None = None,
    admin_key: str | None = None,
    fresh: bool = False,
    command: Sequence[str] | None = None,
    cwd: Path | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Start ``sglang serve`` on ``model``, and afterwards end it with all its processes.

    ``fresh`` starts it as users do, for effects of a real start; it takes many times as long.
    ``command`` is another way to launch it, from the folder ``cwd``.
    """
    port = port or free_port()
    arguments = [
        *(command or (AS_USERS_DO if fresh else IN_A_FORK)), "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--log-level", "info",
        "--max-total-tokens", "65536", "--max-running-requests", "64",
        "--skip-server-warmup",
        # fixed, because the default is the fastest dtype of the CPU
        "--dtype", "bfloat16", *flags,
    ]  # fmt: skip
    headers = {}
    if admin_key is not None:
        arguments += ["--admin-api-key", admin_key]
        headers["Authorization"] = f"Bearer {admin_key}"
    with log.open("wb") as sink:
        process = start(arguments, output=sink, env=env or {}, fresh=fresh, cwd=cwd)
    server = Server(f"http://127.0.0.1:{port}", process, log, headers)
    RUNNING.append(server)
    try:
        _wait_until_up(server)
        yield server
    finally:
        RUNNING.remove(server)
        end(process)


def _wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not server.is_alive():
            raise RuntimeError(f"the server did not start:\n{server.log_text()[-4000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if _is_up(server):
                return
        time.sleep(0.05)
    raise TimeoutError(f"the server did not come up:\n{server.log_text()[-4000:]}")


def _is_up(server: Server) -> bool:
    """Ask for a state, and not for a token, which takes ``/health`` a second."""
    status = httpx.get(server.url + "/ping", timeout=30, **PLAIN).status_code
    if status == 401:  # an --api-key, for which /health does not ask
        status = httpx.get(server.url + "/health", timeout=30, **PLAIN).status_code
    return status == 200
