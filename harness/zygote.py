"""A process with SGLang imported that forks: its forks skip the imports.

``python -m harness.zygote FD`` imports, then waits on the unix socket FD for commands from
``harness/forking.py``. Imports are most of a server's start, and each of its ranks repeats them. A
fork skips them and does all else like a fresh process: the zygote loads no plugin, applies no patch
and reads no flag.

Workers of a test run are forks, too. Their zygote has ``--only-imports`` behind FD: it leaves out
what servers do faster or slower than users' ones do (``_prepare_servers``). A worker makes its
servers' zygote by a fork, which has the imports already.

A fork may rely on:

- One thread. The zygote only imports, so no lock is held by a thread missing in a fork, and OpenMP
  has no pool yet. ``_check_that_forks_are_safe`` checks.
- Its parent. The zygote forks twice and the process in between ends, so the kernel gives the child
  to the nearest *subreaper* among its ancestors: the asking process. Exit codes, parent-death
  signals and process trees are then those of a started process.
- A clean zygote of its own for its children, forked before it runs anything. When a server starts
  its ranks, it has threads, connections and plugins, and its ranks inherit none of them.
  ``multiprocessing`` asks this zygote in place of starting an interpreter.

``tests/test_plugin_start.py`` tests the rest: imports work, each process finds its plugins in time,
and no two ranks hash strings alike.
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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Union

from setproctitle import getproctitle, setproctitle

from harness import forking
from harness.forking import (
    Command,
    Imports,
    Origin,
    Zygote,
    become_subreaper,
    end_with_parent,
    receive,
    send,
)
from harness.starting import STEP_MS
from sglang_inflight.extension import all_extensions
from sglang_inflight.plugin import hook_modules

# imports of a server's processes, except the launcher's own module, which runs as __main__
MODULES = (
    "anyio._backends._asyncio",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    # our modules without effects at import
    "sglang_inflight.livepatch",
    "sglang_inflight_tools.reference",
    *hook_modules(without={"ray"}),
)

# more file descriptors than a process has when it starts others
_LOW_NUMBERS = 256

# the first of its entries in ``sys.path``
_STANDARD_LIBRARY = str(
    Path(sys.base_prefix, sys.platlibdir, "python{}{}.zip".format(*sys.version_info))
)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    serves = sys.argv[2:] != ["--only-imports"]
    gc.disable()  # imported objects stay, so looking at them would be in vain
    if forking.origin is None:
        with _low_numbers_kept_free():
            imports = _import_all()
    else:
        imports = forking.origin.imports
        # its orphans are for the asking process
        become_subreaper(False)
    if serves:
        _prepare_servers()
    getproctitle()  # finds the title's place, which a new environment hides
    _check_that_forks_are_safe()
    gc.collect()
    gc.freeze()  # pages without a collector's writes stay shared
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently
    send(connection, imports.seen if forking.origin is None else imports.in_a_fork())
    command, zygote = _fork(connection, imports)
    forking.origin = None if zygote is None else Origin(zygote, imports, serves)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(command, imports.made)
    _run(command.arguments)


def _prepare_servers() -> None:
    """Do once what each server would do, and slow down their steps."""
    # not at the top: importing SGLang must happen under watch
    import msgspec
    from sglang.srt.managers import io_struct
    from sglang.srt.plugins import hook_registry

    from harness import kept_plan, pace
    from harness.kept_places import KeptPlaces
    from sglang_inflight import messages

    # msgspec keeps what it learns of a message's fields
    known = (*messages.calls(), *messages.answers())
    msgspec.msgpack.Decoder(Union[known], dec_hook=io_struct.dec_hook)  # noqa: UP007
    places = KeptPlaces(hook_registry._propagate_patch)
    places.complete()
    replace: Any = places.replace
    # for good: the forks import little more
    hook_registry._propagate_patch = replace
    kept_plan.install()
    pace.install()


@contextlib.contextmanager
def _low_numbers_kept_free() -> Iterator[None]:
    """Keep low file descriptor numbers free of files opened by imports.

    A fork puts its descriptors at the asked numbers, and closing an import's file later would close
    them.
    """
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(_LOW_NUMBERS)]
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


# variables read past Python
_READ_IN_C = ("OMP_NUM_THREADS", "TRITON_INTERPRET", "MALLOC_PERTURB_")

# constants of SGLang's scheduler that it reads at its import, and that tests change
_READ_AGAIN = ("TEST_RETRACT", "TEST_RETRACT_INTERVAL")


def _import_all() -> Imports:
    before, seen = dict(os.environ), set(_READ_IN_C)
    environ = type(os.environ)
    read = environ.__getitem__

    def look(self: Any, name: str) -> str:
        seen.add(name)
        return read(self, name)

    environ.__getitem__ = look  # type: ignore[method-assign]
    try:
        for module in MODULES:
            importlib.import_module(module)
        # plugins change something when they are called
        for plugin in entry_points(group="sglang.srt.plugins"):
            # SGLang says so itself
            with contextlib.suppress(ImportError):
                importlib.import_module(plugin.module)
    finally:
        environ.__getitem__ = read  # type: ignore[method-assign]
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # a fork gets its own path and reads constants again (``_become``), and it reads the step's wait
    # itself (``harness/pace.py``)
    seen -= {"PYTHONPATH", STEP_MS, *(f"SGLANG_{name}" for name in _READ_AGAIN)}
    return Imports({name: before.get(name) for name in seen}, made)


def _check_that_forks_are_safe() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"an import started threads, which a fork would lose: {threads}")


def _fork(connection: socket.socket, imports: Imports) -> tuple[Command, Zygote | None]:
    """Fork for each command. Return in the forked processes only, with a clean zygote of theirs.

    A childless command's process has none.
    """
    while True:
        received = receive(connection)
        if received is None:
            os._exit(0)  # the asking process has ended
        command, fds = received
        pid = _fork_orphan(command)
        if pid is not None:
            for fd in fds:
                os.close(fd)
            send(connection, pid)
            continue
        connection.close()
        _place(fds, command.fds)
        if command.childless:
            return command, None
        ours, connection = socket.socketpair()
        if os.fork() == 0:
            # the clean zygote of the new process
            ours.close()
            for fd in command.fds:
                if fd > 2:
                    os.close(fd)
            continue
        connection.close()
        become_subreaper()
        zygote = Zygote(ours)
        zygote.take_over_spawn()
        if command.forks_commands:
            zygote.take_over_commands(imports.equal_those_in)
        return command, zygote


def _fork_orphan(command: Command) -> int | None:
    """Fork a child of the asking process, and return its id; return None in the child."""
    told, tell = os.pipe()
    go, let_go = os.pipe()
    between = os.fork()
    if between:
        os.close(tell)
        os.close(go)
        with os.fdopen(told, "rb") as pipe:
            pid = int(pipe.read())
        # the end of the process in between hands over its child, before this returns
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
    # not earlier: the parent-death signal concerns the parent at this moment
    if os.read(go, 1) != b"!":
        os._exit(1)
    os.close(go)
    if command.own_group:
        end_with_parent()
    return None


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the received file descriptors the numbers they have at the sender."""
    top = 1 + max([*fds, *numbers])
    moved = [top + i for i in range(len(fds))]
    for fd, high in zip(fds, moved, strict=True):
        os.dup2(fd, high, inheritable=False)
        os.close(fd)
    for high, number in zip(moved, numbers, strict=True):
        os.dup2(high, number)
        os.close(high)


def _become(command: Command, made: Mapping[str, str]) -> None:
    """Set the state that the system and Python give a started process."""
    from sglang.srt import environ

    had = _added_to_path()
    os.environ.clear()
    os.environ.update({**made, **command.env})
    os.chdir(command.cwd)
    first = command.cwd if "-m" in command.arguments[:2] else ""
    sys.path[:] = [first, *(entry for entry in sys.path[1:] if entry not in had)]
    # before the standard library, and after site-packages' entries at the front
    place = sys.path.index(_STANDARD_LIBRARY)
    sys.path[place:place] = _added_to_path()
    importlib.invalidate_caches()
    # the path may have other extensions
    all_extensions.cache_clear()
    for name in _READ_AGAIN:
        field = getattr(environ.envs, f"SGLANG_{name}")
        setattr(sys.modules["sglang.srt.managers.scheduler"], name, field.get())
    os.sched_setaffinity(0, command.cores)
    for limit, value in command.limits.items():
        resource.setrlimit(limit, value)
    setproctitle(" ".join([sys.executable, *command.arguments]))


def _added_to_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(arguments: Sequence[str]) -> None:
    """Run ``-m MODULE …`` or ``-c CODE …``, perhaps after ``-u``, like ``python``."""
    if arguments[0] == "-u":
        # output waits for its line alone
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
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
