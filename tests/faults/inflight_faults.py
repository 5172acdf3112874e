"""A test plugin for SGLang: faults in a rank's staging, in SGLang's handlers and in a worker.

The file named by ``INFLIGHT_TEST_FAULT`` gives the rank or process, the phase and the kind. Each
call reads the file, so a test switches faults while the server runs.
``tests.support.faults.Faults`` writes the file. The plugin also sets the nodes' timeouts to
``INFLIGHT_TEST_CONSISTENCY_S`` and ``INFLIGHT_TEST_SILENCE_S``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# a forgotten fault must not long outlive its test
LONGEST_HANG_S = 60.0
POLL_S = 0.01
# tensors before a fault "in the middle"
MIDDLE = 5

Pairs = Iterator[tuple[str, Any]]


def install() -> None:
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_inflight.scheduler.boundary import Boundary
    from sglang_inflight.scheduler.update.jobs import Jobs
    from sglang_inflight_tools.reference import PageSaver

    if has("nodes"):
        from sglang_inflight.extensions.nodes import check, relay

        check.WAIT_S = float(os.environ.get("INFLIGHT_TEST_CONSISTENCY_S", check.WAIT_S))
        relay.SILENCE_S = float(os.environ.get("INFLIGHT_TEST_SILENCE_S", relay.SILENCE_S))
    if "INFLIGHT_TEST_FURTHER_NODE" in os.environ:
        # the first node, on this machine, may have bound the server's ports already
        server_args.wait_port_available = lambda port, name, **_: True
    faulty: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (Jobs.fill, first),
        (Jobs.take_in, middle),
        (Jobs.take_bulk, one_by_one),
        (Jobs.seal, vote),
        (Boundary.flush, flush),
        (PageSaver.pause, saver),
    ]
    if has("saves"):
        from sglang_inflight.extensions.saves.files import NewFile
        from sglang_inflight.extensions.saves.stream import Connection

        faulty += [(NewFile.write, write), (Connection.send, send)]
    if has("memory"):
        from sglang_inflight.extensions.memory.on_rank import MemoryRelease

        faulty.append((MemoryRelease.copy_for, copy))
    for method, hook in faulty:
        target = f"{method.__module__}.{method.__qualname__}"
        HookRegistry.register(target, hook, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.slow_down", handler, HookType.AROUND)
    if has("workers"):
        worker = "sglang_inflight.extensions.workers.worker.Worker"
        HookRegistry.register(f"{worker}._act", news, HookType.AROUND)


def has(extension: str) -> bool:
    return find_spec(f"sglang_inflight.extensions.{extension}") is not None


def first(fill: Callable[..., Any], jobs: Any, update: Any, *args: Any) -> Any:
    fail("first", update)
    return fill(jobs, update, *args)


def middle(take_in: Callable[..., Pairs], jobs: Any, update: Any, weights: Pairs) -> Pairs:
    for index, (name, tensor) in enumerate(take_in(jobs, update, weights)):
        if index == MIDDLE and fail("middle", update):
            yield name, tensor.new_zeros([*tensor.shape, 3])
        yield name, tensor


def one_by_one(take_bulk: Callable[..., Any], *args: Any) -> Any:
    """Leave the tensors to ``middle``, if it is to fail."""
    stretch = args[-2]
    return take_bulk(*args) if wanted("middle") is None else range(len(stretch.names))


def vote(seal: Callable[..., Any], jobs: Any, update: Any, *args: Any) -> Any:
    fail("vote", update)
    return seal(jobs, update, *args)


def flush(flush_now: Callable[..., None], boundary: Any, *, empty_cache: bool) -> None:
    fail("flush", None)
    flush_now(boundary, empty_cache=empty_cache)


def copy(copy_for: Callable[..., Any], memory_release: Any, prepared: Any) -> Any:
    fail("copy", prepared)
    return copy_for(memory_release, prepared)


def saver(pause: Callable[..., Any], pages: Any, tag: str) -> Any:
    fail("saver", None)
    return pause(pages, tag)


def write(write_now: Callable[..., None], file: Any, content: Any) -> None:
    fail("write", None)
    write_now(file, content)


def send(send_now: Callable[..., None], connection: Any, kind: Any, content: Any) -> Any:
    """Fail at a piece: by then the receiver has the head."""
    if kind.name == "PIECE":
        fail("send", None)
        if wanted("send") == "wrong_tensor":
            content = bytes(byte ^ 1 for byte in bytes(content))
    return send_now(connection, kind, content)


def handler(slow_down: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    fail("handler", None)
    return slow_down(scheduler, request)


def news(act: Callable[..., None], worker: Any, told: Any) -> None:
    fail("news", None)
    act(worker, told)


def fail(phase: str, update: Any) -> bool:
    """Do what the file asks for. Return True if a wrong tensor is to be sent."""
    kind = wanted(phase)
    if kind == "raise":
        raise RuntimeError(f"injected fault in phase {phase}")
    if kind in ("hang", "hang_deaf"):
        Path(os.environ["INFLIGHT_TEST_FAULT"] + ".reached").touch()
    ends_at = time.monotonic() + LONGEST_HANG_S
    while wanted(phase) in ("hang", "hang_deaf") and time.monotonic() < ends_at:
        if kind == "hang":
            update.check()
        time.sleep(POLL_S)
    return kind == "wrong_tensor"


def wanted(phase: str) -> str | None:
    from sglang_inflight.topology import own_index

    try:
        fault = json.loads(Path(os.environ["INFLIGHT_TEST_FAULT"]).read_text())
    except (KeyError, FileNotFoundError):
        return None
    if fault["phase"] != phase or fault["pid"] not in (None, os.getpid()):
        return None
    if fault["rank"] not in (None, own_index()):
        return None
    kind: str = fault["kind"]
    return kind
