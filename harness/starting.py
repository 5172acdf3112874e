"""Python processes for tests: forked from a process with SGLang imported, or started fresh."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from harness import forking
from harness.forking import Command, Forked, Zygote, become_subreaper

ROOT = Path(__file__).parents[1]

Process = subprocess.Popen[Any] | Forked

# each has 0.8 GB of its own
_MOST_ZYGOTES = 3
_making: defaultdict[tuple[tuple[str, str | None], ...], threading.Lock]
_making = defaultdict(threading.Lock)

# run on released SGLang, without our plugin, to see that tests guarding a fix of ours fail there
UPSTREAM = os.environ.get("INFLIGHT_TEST_UPSTREAM") == "1"

ENV = {
    # one thread a process: several would wait for each other on shared cores
    "OMP_NUM_THREADS": "1",
    # seconds between the front end's checks for a client's disconnect
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
if UPSTREAM:
    # names of plugins to load: this one makes SGLang run on a CPU, and changes nothing else
    ENV["SGLANG_PLUGINS"] = "inflight_reference"

# milliseconds that a decoding step waits (``harness/pace.py``)
STEP_MS = "INFLIGHT_TEST_STEP_MS"

_LEFT_OUT = (
    # a change of the test's name must not cost a new zygote
    "PYTEST_CURRENT_TEST",
    # without compiled files, each process of each server would compile our modules
    "PYTHONDONTWRITEBYTECODE",
)


def start(
    arguments: Sequence[str],
    *,
    output: IO[Any],
    errors: IO[Any] | None = None,
    reads: IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
    forks_commands: bool = False,
) -> Process:
    """Run ``python`` with these arguments, in a process group of its own.

    Errors go to ``output`` unless ``errors`` is given. ``env`` is added to our environment. A
    process that is not ``fresh`` is forked and skips the imports. With ``forks_commands`` so do the
    commands of this Python that it starts by ``subprocess``.
    """
    env = {**_environment(), **(env or {})}
    # we wait for orphans of an ended process
    become_subreaper()
    folder = cwd or Path.cwd()
    zygote = None if fresh or _has_accelerator() else _zygote_for(env)
    if zygote is None:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=reads or subprocess.DEVNULL,
            stdout=output,
            stderr=errors or subprocess.STDOUT,
            env=env,
            cwd=folder,
            # no session of its own: Linux shares out cores among sessions, so a process with little
            # work could wait for seconds while a server keeps all cores busy
            process_group=0,
        )
    command = Command(
        arguments, env, (0, 1, 2), own_group=True, forks_commands=forks_commands, cwd=str(folder)
    )
    with open(os.devnull, "rb") as nothing:
        files = (reads or nothing, output, errors or output)
        return Forked(zygote.fork(command, [file.fileno() for file in files]))


@contextlib.contextmanager
def forked_children() -> Iterator[None]:
    """Fork the processes that code in the block starts by ``multiprocessing``."""
    zygote = None if _has_accelerator() else _zygote_for(_environment())
    if zygote is None:
        yield
        return
    become_subreaper()
    give_back = zygote.take_over_spawn()
    try:
        yield
    finally:
        give_back()


def fork_workers() -> None:
    """Fork the Python processes that this process starts by ``subprocess`` from now on.

    They have this process' environment. Their imports are those of our servers' environment.
    """
    if _has_accelerator():
        return
    made = _connect_to_zygote(_environment(), "--only-imports")
    if made is not None:
        become_subreaper()
        zygote, _ = made
        zygote.take_over_commands(lambda env: True, forks_commands=False)


def make_zygotes(*changes: Mapping[str, str | None]) -> None:
    """Make our environment's zygote, and those of environments with ``changes``, all at once.

    Later starts find them. ``changes`` are of variables that SGLang's imports read.
    """
    if _has_accelerator():
        return
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(_zygote, *sorted(each.items())) for each in ({}, *changes)]
    for each in made:
        each.result()


def on_path(*folders: Path) -> dict[str, str]:
    """Return an environment with these folders on the import path."""
    found = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), found]))}


def end(process: Process) -> None:
    """End a process and its group, and wait until all of them are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-process.pid, 0)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _LEFT_OUT} | ENV


def _has_accelerator() -> bool:
    """Tell whether an accelerator is present: its state after importing SGLang does not survive a
    fork. The glass card (``harness/glass``) has no state before its first use.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != "glass"


def _zygote_for(env: Mapping[str, str]) -> Zygote | None:
    """Return a zygote with the imports of a process in this environment.

    Return None if imports start threads in this environment, as OpenMP does with more than one
    thread allowed: such a process is started fresh.
    """
    usual = _zygote()
    if usual is None:
        return None
    _, seen = usual
    changes = ((name, env.get(name)) for name in sorted(seen) if env.get(name) != seen[name])
    found = _zygote(*changes)
    return None if found is None else found[0]


def _zygote(*changes: tuple[str, str | None]) -> tuple[Zygote, Mapping[str, str | None]] | None:
    """Return a zygote in our environment with these changes, and the variables read by its imports.

    The zygote ends when our connection to it closes. Return None after an error, which is printed.
    """
    # servers started at once would each make one
    with _making[changes]:
        return _make_zygote(*changes)


# the one of our environment is asked for at each start, so the oldest of the others makes room
@functools.lru_cache(_MOST_ZYGOTES)
def _make_zygote(
    *changes: tuple[str, str | None],
) -> tuple[Zygote, Mapping[str, str | None]] | None:
    changed = {**_environment(), **dict(changes)}
    env = {name: value for name, value in changed.items() if value is not None}
    own = forking.origin
    if own is not None and not own.imports.equal_those_in(env):
        own = None
    if own is not None and own.serves:
        return own.zygote, own.imports.in_a_fork()
    made = _connect_to_zygote(env, by=own.zygote if own is not None else None)
    if made is None:
        print(f"nothing is forked with {changes}", file=sys.stderr)
    return made


def _connect_to_zygote(
    env: Mapping[str, str], *flags: str, by: Zygote | None = None
) -> tuple[Zygote, Mapping[str, str | None]] | None:
    """Make a zygote, in a fork of ``by`` if that is given, and return what ``_zygote`` returns."""
    ours, theirs = socket.socketpair()
    arguments = ["-m", "harness.zygote", str(theirs.fileno()), *flags]
    with tempfile.TemporaryFile() as output, open(os.devnull, "rb") as nothing:
        if by is None:
            subprocess.Popen(
                [sys.executable, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=nothing,
                stdout=output,
                stderr=output,
                env=env,
                cwd=ROOT,
                process_group=0,
            )
        else:
            become_subreaper()
            fds = (0, 1, 2, theirs.fileno())
            command = Command(arguments, env, fds, own_group=True, cwd=str(ROOT))
            files = (nothing, output, output, theirs)
            by.fork(command, [file.fileno() for file in files])
        theirs.close()
        zygote = Zygote(ours)
        try:
            return zygote, zygote.hear()
        except EOFError:
            output.seek(0)
            said = output.read().decode()
            print(f"the zygote has ended: {said[-1000:]}", file=sys.stderr)
            return None
