"""Pauses under SGLang's own scripted runtime, an interceptor of SGLang's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.test.scripted_runtime import http_server
from sglang.test.scripted_runtime.http_server import ScriptedHttpServer

from harness.starting import ENV, forked_children
from tests.support import pause_scripts
from tests.support.pool import ServerPool


@pytest.fixture(scope="module")
def scripted(pool: ServerPool, checkpoints: Path) -> Iterator[ScriptedHttpServer]:
    pool.discard()
    with pytest.MonkeyPatch.context() as patch, forked_children():
        # the runtime inspects this backend; SGLang's wheel lacks the other in the expected form
        core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
        for name, value in {**ENV, **core}.items():
            patch.setenv(name, value)
        server = ScriptedHttpServer.start(
            model_path=str(checkpoints / "v0"),
            max_total_tokens=4096,
            max_running_requests=4,
            # its checks of each forward need GPU kernels
            kv_canary="none",
            kv_canary_real_data="none",
            kv_canary_sweep_interval=0,
        )
    yield server
    with pytest.MonkeyPatch.context() as patch:
        # its scheduler exits by itself, and the server's other processes would wait
        patch.setattr(http_server, "SHUTDOWN_JOIN_TIMEOUT_S", 1.0)
        server.shutdown()


# the limit covers the fixture too, as the runtime waits for its server without end
@pytest.mark.timeout(300, func_only=False)
@pytest.mark.parametrize(
    "script", [pause_scripts.freezes_in_place, pause_scripts.parks_in_the_waiting_queue]
)
def test_sglangs_pause_script_succeeds(
    scripted: ScriptedHttpServer, script: Callable[[Any], Any]
) -> None:
    scripted.execute_script(script)
