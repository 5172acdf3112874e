"""A server of two nodes, both on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.server import IN_A_FORK, Server, free_port, schedulers, serve
from harness.starting import ROOT, Process, end, on_path, start
from tests.support.plugins import TESTS

# timeouts of a minute, and of a quarter of a minute, shortened
_SHORT = {"INFLIGHT_TEST_CONSISTENCY_S": "8", "INFLIGHT_TEST_SILENCE_S": "2"}


@dataclass
class Nodes:
    """Two nodes. ``first`` answers HTTP for both."""

    first: Server
    second: Process
    second_log: Path

    def stop_second(self) -> None:
        for process in self._processes():
            process.send_signal(signal.SIGSTOP)

    def continue_second(self) -> None:
        for process in self._processes():
            process.send_signal(signal.SIGCONT)

    def kill_second(self) -> None:
        end(self.second)

    def _processes(self) -> list[psutil.Process]:
        """Return the second node's launcher and ranks."""
        return [psutil.Process(self.second.pid), *schedulers(self.second.pid)]


def nodes_environment(*plugins: str) -> dict[str, str]:
    """Return the environment of nodes with the tests' plugins and with short timeouts."""
    folders = [TESTS / plugin for plugin in ("faults", *plugins)]
    # ``second`` may be a module of this repository, started in another folder
    return {**on_path(*folders, ROOT), **_SHORT}


@contextlib.contextmanager
def serve_nodes(
    model: Path,
    *flags: str,
    folder: Path,
    env: dict[str, str],
    second: Sequence[str] = IN_A_FORK,
    second_env: dict[str, str] | None = None,
) -> Iterator[Nodes]:
    """Start both nodes, with one rank each. ``second`` is the second node's command.

    The nodes run in different folders, so a relative path differs between them.
    """
    two = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    log = folder / "second.log"
    command = [
        *second, "--model-path", str(model), "--port", str(free_port()), "--node-rank", "1",
        "--dtype", "bfloat16", "--max-total-tokens", "65536", "--max-running-requests", "64",
        *two, *flags,
    ]  # fmt: skip
    with log.open("wb") as output:
        further = {**env, "INFLIGHT_TEST_FURTHER_NODE": "1", **(second_env or {})}
        process = start(command, output=output, env=further, cwd=folder)
    try:
        flags = ("--node-rank", "0", *two, *flags)
        with serve(model, *flags, log=folder / "first.log", env=env) as first:
            yield Nodes(first, process, log)
    except (RuntimeError, TimeoutError) as error:
        error.add_note(f"the second node:\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        # works for stopped processes, too
        end(process)


def main() -> None:
    """Run the second node as an ``Engine``: ``python -m tests.support.nodes FLAGS``.

    The errors of the engine's methods go into ``said.json``, in its folder.
    """
    import json
    import time

    import sglang
    from sglang.srt.server_args import prepare_server_args

    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    engine = sglang.Engine(server_args=prepare_server_args(sys.argv[1:]))
    said = {}
    for name, words in {
        "inflight_status": {},
        "pause_generation": {"mode": "in_place"},
        "update_weights_from_disk": {"model_path": "/nowhere"},
        "flush_cache": {},
    }.items():
        try:
            getattr(engine, name)(**words)
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
    draft = Path("said.draft")
    draft.write_text(json.dumps(said))
    draft.rename("said.json")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
