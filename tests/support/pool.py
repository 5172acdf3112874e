"""A pool of one live server at a time, of the flavour a test asks for.

A server takes long to start, and two servers would share the cores. So tests are grouped by flavour
(``tests/support/servers.py``), and each flavour is started once. A test that hangs or ends its
server costs the next test a fresh start, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx

from harness.server import Server, free_port, serve
from harness.starting import ENV as ENV
from harness.starting import STEP_MS
from harness.starting import UPSTREAM as UPSTREAM
from sglang_inflight.extension import all_extensions
from sglang_inflight.settings import PREFIX, Settings, names_of_extensions

# short on unpatched SGLang, where many tests are about a hang
RESTORE_TIMEOUT_S = 10.0 if UPSTREAM else 60.0


@dataclass(frozen=True)
class Flavour:
    """A server's start options, shared by tests with the same needs."""

    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    admin_key: str | None = None
    # builds the served model in a folder, in place of the marker's version 0
    model: Callable[[Path], Path] | None = None


# small enough for nine requests to make one wait
MAX_RUNNING = 8
MAX_QUEUED = 8
CHUNK = 512
MAX_VERSION_LAG = 1
SMALL_POOL = 20480  # tokens
WATCHDOG_S = 5
WAITING_TIMEOUT_S = 15
GRPC_PORT = free_port()
# longer than a test takes between its pause and its first piece
GRACE_S = 8.0
CUSTOM_LOADER = "tests.support.custom_loader.load_alone"
MASKING_LOADER = "tests.support.custom_loader.load_masked"
ADMIN_KEY = "the-key-of-the-tests"

# Tests on both loops are tests of both forms of staging: ``auto`` keeps second copies on a CPU.
CHANGES = {"SGLANG_INFLIGHT_STAGING": "changes"}

_COMMON = (
    "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(MAX_RUNNING),
    "--weight-version", "v0",
)  # fmt: skip

# servers by the name of their fixture; tests run in this order
FLAVOURS = {
    "server": Flavour(_COMMON, {"SGLANG_INFLIGHT_SSE_COMMENT_S": "0.2"}),
    # with limits few tests come near, because another server costs more time
    "normal_loop_server": Flavour(
        (
            *_COMMON,
            "--disable-overlap-schedule",
            "--enable-metrics",
            "--max-queued-requests", str(MAX_QUEUED),
            "--soft-watchdog-timeout", str(WATCHDOG_S),
            "--grpc-port", str(GRPC_PORT),
            "--custom-weight-loader", CUSTOM_LOADER, MASKING_LOADER,
        ),
        {
            **CHANGES,
            "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_TIMEOUT_S),
            "SGLANG_INFLIGHT_SSE_COMMENT_S": "0.2",
            "SGLANG_INFLIGHT_SSE_COMMENT": "1",
        },
    ),
    "off_server": Flavour(
        (
            *_COMMON,
            "--max-total-tokens", str(SMALL_POOL),
            "--soft-watchdog-timeout", str(WATCHDOG_S),
        ),
        {"SGLANG_INFLIGHT_STAGING": "off", "SGLANG_INFLIGHT_MAX_VERSION_LAG": str(MAX_VERSION_LAG)},
    ),
    # HTTP is served by two processes
    "workers_server": Flavour(
        (*_COMMON, "--tokenizer-worker-num", "2", "--enable-memory-saver"),
        {
            "SGLANG_INFLIGHT_VLLM_ROUTES": "1",
            "SGLANG_INFLIGHT_SSE_COMMENT_S": "0.2",
            "SGLANG_INFLIGHT_SSE_COMMENT": "1",
            # seconds until uvicorn replaces a dead worker
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "3",
            # requests outlast calls to several workers by slow steps, which cost less than tokens
            STEP_MS: "40",
        },
        ADMIN_KEY,
    ),
    "transparent_server": Flavour(
        _COMMON,
        {
            "SGLANG_INFLIGHT_TRANSPARENT": "1",
            "SGLANG_INFLIGHT_TRANSPARENT_GRACE_S": str(GRACE_S),
        },
    ),
    "vllm_server": Flavour(_COMMON, {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}, ADMIN_KEY),
    "core_server": Flavour(_COMMON, {"SGLANG_INFLIGHT_EXTENSIONS": "none"}),
    "whole_server": Flavour(_COMMON, {"SGLANG_INFLIGHT_SESSIONS": "whole"}),
    "whole_off_server": Flavour(
        _COMMON, {"SGLANG_INFLIGHT_SESSIONS": "whole", "SGLANG_INFLIGHT_STAGING": "off"}
    ),
    "whole_transparent_server": Flavour(
        _COMMON, {"SGLANG_INFLIGHT_SESSIONS": "whole", "SGLANG_INFLIGHT_TRANSPARENT": "1"}
    ),
    "as_before_server": Flavour(_COMMON, {**CHANGES, "SGLANG_INFLIGHT_SESSIONS": "as_before"}),
}  # fmt: skip


def add_both_loops(name: str, flavour: Flavour) -> list[str]:
    """Add a flavour with overlap and one without, and return their names."""
    FLAVOURS[name] = flavour
    normal = f"{name}_normal_loop"
    FLAVOURS[normal] = replace(
        flavour,
        flags=(*flavour.flags, "--disable-overlap-schedule"),
        env={**CHANGES, **flavour.env},
    )
    return [name, normal]


def settings_of_extensions_here(env: Mapping[str, str]) -> dict[str, str]:
    """Leave out settings of extensions that are off in this run, or not there.

    A server would refuse them.
    """
    chosen = {**os.environ, **env}.get(f"{PREFIX}EXTENSIONS")
    names = None if chosen is None else names_of_extensions(chosen)
    here = [each for each in all_extensions() if names is None or each.name in names]
    kinds: list[type[Any]]
    kinds = [Settings, *(each.settings for each in here if each.settings is not None)]
    known = {PREFIX + setting.name.upper() for kind in kinds for setting in fields(kind)}
    return {
        name: value for name, value in env.items() if not name.startswith(PREFIX) or name in known
    }


class ServerPool:
    """Keeps one server running, and starts another for another flavour."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        # what the running server was started with
        self._served = model
        self._logs = logs
        self._running: tuple[Flavour, Server] | None = None
        self._stack = contextlib.ExitStack()
        self._started = 0

    def get(self, flavour: Flavour) -> Server:
        """Return the running server if it has this ``flavour``, otherwise a fresh one."""
        if self._running is not None:
            running_flavour, server = self._running
            if running_flavour == flavour and server.is_alive():
                return server
        self.discard()
        self._started += 1
        self._served = self._model
        if flavour.model is not None:
            self._served = flavour.model(self._logs / f"model-{self._started}")
        server = self._stack.enter_context(
            serve(
                self._served,
                *flavour.flags,
                log=self._logs / f"server-{self._started}.log",
                env=settings_of_extensions_here(flavour.env),
                admin_key=flavour.admin_key,
            )
        )
        self._running = flavour, server
        return server

    def discard(self) -> None:
        """End the running server, if any."""
        self._running = None
        self._stack.close()

    def restore(self) -> None:
        """Bring the server back to its start: no pause, no request, weights v0.

        Discard a server that cannot be restored, and raise ``AssertionError``, except on unpatched
        SGLang: there tests are meant to break servers.
        """
        if self._running is None:
            return
        _, server = self._running
        try:
            restore(server, self._served)
        except (AssertionError, httpx.HTTPError) as error:
            tail = server.log_text()[-3000:]
            self.discard()
            if not UPSTREAM:
                said = f"the server is not well after the test: {error}\n{tail}"
                raise AssertionError(said) from None


def restore(server: Server, model: Path) -> None:
    assert server.is_alive(), "the server ended"

    def post(path: str, body: dict[str, Any]) -> Any:
        return server.post(path, body, timeout=RESTORE_TIMEOUT_S)

    assert post("/continue_generation", {})["status_code"] == 200
    if UPSTREAM:
        post("/abort_request", {"abort_all": True})
        non_blocking = {}
    else:
        empty(server)
        non_blocking = {"non_blocking": True, "kv_cache": "recompute"}
    update = {"model_path": str(model), "weight_version": "v0", **non_blocking}
    answer = post("/update_weights_from_disk", update)
    assert answer["status_code"] == 200, answer
    assert answer["success"], answer


def outlast_watchdog(server: Server, at_least_s: float = 0.0) -> None:
    """Expect no report of the soft watchdog, which looks twice in its timeout.

    A hard watchdog would end the server at a slow step of a busy machine.
    """
    ends_at = time.monotonic() + max(1.5 * WATCHDOG_S, at_least_s) + 1
    reports = _count_reports(server)
    while time.monotonic() < ends_at:
        assert server.is_alive()
        assert _count_reports(server) == reports
        time.sleep(0.2)


def _count_reports(server: Server) -> int:
    return server.log_text().count("Scheduler watchdog timeout")


def empty(server: Server) -> None:
    """Abort until no request is left, because an abort misses requests not yet queued."""
    deadline = time.monotonic() + RESTORE_TIMEOUT_S
    while time.monotonic() < deadline:
        server.post("/abort_request", {"abort_all": True}, timeout=RESTORE_TIMEOUT_S)
        status = server.get("/inflight/status", timeout=RESTORE_TIMEOUT_S)
        assert status["status_code"] == 200, status
        if not status["running"] and not status["waiting"]:
            return
    raise AssertionError(f"requests are left after aborting all of them: {status}")


@contextlib.contextmanager
def server_pool(model: Path, logs: Path) -> Iterator[ServerPool]:
    pool = ServerPool(model, logs)
    try:
        yield pool
    finally:
        pool.discard()
