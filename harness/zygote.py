"""A process that has imported SGLang, and forks: what it forks need not import it again.

``python -m harness.zygote FD`` imports, and then waits on the unix socket FD for
commands (``harness/forking.py`` sends them). Imports are most of a server's start,
and each of its ranks does them again. A fork skips them and does all the rest as a fresh
process does it: no plugin is loaded here, no patch applied, no flag read.

What a fork may rely on:

- One thread. The zygote does nothing but import, so no lock can be held by a thread that a
  fork leaves behind, and OpenMP has no pool yet; ``_check_that_forks_are_safe`` looks.
- Its parent is whoever asked. The zygote forks twice, the process in between ends, and the
  kernel hands its child to the nearest ancestor that is a *subreaper*, which every asker is.
  So exit codes, parent-death signals and process trees are those of a started process.
- A clean zygote of its own, forked before it runs anything, makes its children: a server
  has threads, connections and plugins when it starts its ranks, and these get none of them.
  ``multiprocessing`` asks it wherever it would start a fresh interpreter.

What forks hide, ``tests/test_fresh_start.py`` looks at: that imports work, that each process
finds its plugins in time, and that no two ranks hash strings alike.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import runpy
import signal
import socket
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from setproctitle import getproctitle, setproctitle

from harness.forking import (
    Command,
    Zygote,
    become_subreaper,
    end_with_parent,
    receive,
    send,
)
from sglang_inflight.plugin import HOOK_LISTS

# what a server's processes import, the launcher's own module excepted: it is to run as __main__
MODULES = (
    "anyio._backends._asyncio",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    # ours, in which nothing is done until it is called
    "sglang_inflight.livepatch",
    "sglang_inflight.reference.host_tier",
    *HOOK_LISTS,
)

# file descriptors, more than a process has when it starts others
_LOW_NUMBERS = 256

# first of its entries in ``sys.path``
_STANDARD_LIBRARY = str(
    Path(sys.base_prefix, sys.platlibdir, "python{}{}.zip".format(*sys.version_info))
)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # what is imported stays, and each look at it would be in vain
    with _low_numbers_kept_free():
        seen, made = _import_all()
    # not at the top: it imports SGLang, which is watched
    from harness.hook_search import HookSearch

    HookSearch().install()
    getproctitle()  # it looks for the place of the title, which a new environment hides
    _check_that_forks_are_safe()
    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a word
    send(connection, seen)
    command = _fork(connection)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(command, made)
    _run(command.arguments)


@contextlib.contextmanager
def _low_numbers_kept_free() -> Iterator[None]:
    """What imports open gets a number that no process asks for: a fork puts what it is given at
    the numbers that are asked for, and whoever closes what an import opened would close that.
    """
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(_LOW_NUMBERS)]
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


def _import_all() -> tuple[dict[str, str | None], dict[str, str]]:
    """Import. Returns the environment variables that imported code looked at, and those it made.

    A process that has another value in one of the former would have imported otherwise.
    """
    before, seen = dict(os.environ), {"OMP_NUM_THREADS"}  # that is read by a library in C
    environ = type(os.environ)
    read = environ.__getitem__

    def look(self: Any, name: str) -> str:
        seen.add(name)
        return read(self, name)

    environ.__getitem__ = look  # type: ignore[method-assign]
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        environ.__getitem__ = read  # type: ignore[method-assign]
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    seen.discard("PYTHONPATH")  # a fork gets its own, see ``_become``
    return {name: before.get(name) for name in seen}, made


def _check_that_forks_are_safe() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"an import started threads, which a fork would lose: {threads}")


def _fork(connection: socket.socket) -> Command:
    """Fork for every command that comes. Returns in the forked processes, and only there."""
    while True:
        received = receive(connection)
        if received is None:
            os._exit(0)  # whoever asked has ended
        command, fds = received
        pid = _fork_orphan(command)
        if pid is not None:
            for fd in fds:
                os.close(fd)
            send(connection, pid)
            continue
        connection.close()
        _place(fds, command.fds)
        ours, connection = socket.socketpair()
        if os.fork() == 0:
            # the clean zygote of the process that has just been forked
            ours.close()
            for fd in command.fds:
                if fd > 2:
                    os.close(fd)
            continue
        connection.close()
        become_subreaper()
        Zygote(ours).take_over_spawn()
        return command


def _fork_orphan(command: Command) -> int | None:
    """The process id of a child of whoever asked; None in that child."""
    told, tell = os.pipe()
    go, let_go = os.pipe()
    between = os.fork()
    if between:
        os.close(tell)
        os.close(go)
        with os.fdopen(told, "rb") as pipe:
            pid = int(pipe.read())
        # its end gives its child away, before this returns
        os.waitpid(between, 0)
        os.write(let_go, b"!")
        os.close(let_go)
        return pid
    pid = os.fork()
    if pid:
        if command.own_group:
            os.setpgid(pid, pid)
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.close(told)
    os.close(tell)
    os.close(let_go)
    # not earlier: the parent-death signal is that of the parent of the moment
    if os.read(go, 1) != b"!":
        os._exit(1)
    os.close(go)
    if command.own_group:
        end_with_parent()
    return None


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the received file descriptors the numbers that they have where they come from."""
    top = 1 + max([*fds, *numbers])
    moved = [top + i for i in range(len(fds))]
    for fd, high in zip(fds, moved, strict=True):
        os.dup2(fd, high, inheritable=False)
        os.close(fd)
    for high, number in zip(moved, numbers, strict=True):
        os.dup2(high, number)
        os.close(high)


def _become(command: Command, made: Mapping[str, str]) -> None:
    """What the system gives a process as it starts, and what Python makes of it."""
    had = _added_to_path()
    os.environ.clear()
    os.environ.update({**made, **command.env})
    os.chdir(command.cwd)
    first = command.cwd if command.arguments[0] == "-m" else ""
    sys.path[:] = [first, *(entry for entry in sys.path[1:] if entry not in had)]
    # before the standard library, and behind what site-packages put in front
    place = sys.path.index(_STANDARD_LIBRARY)
    sys.path[place:place] = _added_to_path()
    importlib.invalidate_caches()
    os.sched_setaffinity(0, command.cores)
    for limit, value in command.limits.items():
        resource.setrlimit(limit, value)
    setproctitle(" ".join([sys.executable, *command.arguments]))


def _added_to_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(arguments: Sequence[str]) -> None:
    """As ``python`` runs ``-m MODULE …`` and ``-c CODE …``."""
    option, what, *_ = arguments
    if option == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *arguments[2:]]
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(what, main_module.__dict__)


if __name__ == "__main__":
    main()
