"""Requests to a zygote for new processes: the client's side of ``harness/zygote.py``."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import multiprocessing.util
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import popen_spawn_posix
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# functions of SGLang that run in processes of their own, which start no others
_CHILDLESS = (
    "run_scheduler_process",
    "run_scheduler_process_with_init_pipe",
    "run_detokenizer_process",
)
_LENGTH = struct.Struct("!Q")
_MOST_FDS = 253  # limit of one message in Linux
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def limits_of_this_process() -> dict[int, tuple[int, int]]:
    return {limit: resource.getrlimit(limit) for limit in _LIMITS}


@dataclass(frozen=True)
class Command:
    """A command, and all the state a started process inherits from its parent."""

    arguments: Sequence[str]  # the arguments of ``python``, from ``-u``, ``-m`` or ``-c`` on
    env: Mapping[str, str]
    fds: Sequence[int]  # descriptor numbers, the same in both processes, or their targets
    own_group: bool = False  # own process group, and death with the parent
    forks_commands: bool = False  # what it starts by ``subprocess`` is forked, too
    childless: bool = False  # it gets no zygote, so what it starts would be started fresh
    cwd: str = field(default_factory=os.getcwd)
    cores: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    limits: Mapping[int, tuple[int, int]] = field(default_factory=limits_of_this_process)


class Zygote:
    """A connection to a zygote. Any thread may use it; commands run one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(self, command: Command, fds: Sequence[int] | None = None) -> int:
        """Fork a child of this process, which must be a subreaper, and return its process id."""
        with self._lock:
            send(self._connection, command, command.fds if fds is None else fds)
            return int(self.hear())

    def take_over_spawn(self) -> Callable[[], None]:
        """Make ``multiprocessing`` ask the zygote for processes started by ``spawn``.

        Return a function that undoes this.
        """
        util: Any = multiprocessing.util
        popen: Any = popen_spawn_posix.Popen
        start: Callable[..., int] = util.spawnv_passfds
        launch: Callable[..., None] = popen._launch
        asked = threading.local()

        def note(ours: Any, process: Any) -> None:
            asked.childless = getattr(process._target, "__name__", None) in _CHILDLESS
            launch(ours, process)

        def fork(path: str, args: Sequence[Any], passfds: Sequence[int]) -> int:
            words = [os.fsdecode(word) for word in args]
            if words[-1] != "--multiprocessing-fork":
                return start(path, args, passfds)  # the small resource tracker
            arguments = words[words.index("-c") :]
            fds = (0, 1, 2, *sorted(set(passfds)))
            return self.fork(Command(arguments, dict(os.environ), fds, childless=asked.childless))

        def end() -> None:
            util.spawnv_passfds = start
            popen._launch = launch

        util.spawnv_passfds = fork
        popen._launch = note
        return end

    def take_over_commands(
        self,
        has_same_imports: Callable[[Mapping[str, str]], bool],
        *,
        forks_commands: bool = True,
    ) -> None:
        """Make ``subprocess`` ask the zygote for commands of this Python.

        A command is started fresh in an environment without ``has_same_imports``. The forked ones
        have the given ``forks_commands``.
        """
        popen: Any = subprocess.Popen
        start: Callable[..., None] = popen._execute_child
        signature = inspect.signature(start)

        def execute(process: Any, *args: Any) -> None:
            asked = signature.bind(process, *args).arguments
            env = dict(os.environ if asked["env"] is None else asked["env"])
            if not _is_forkable(asked) or not has_same_imports(env):
                start(process, *args)
                return
            command = Command(
                asked["args"][1:],
                env,
                fds=(0, 1, 2),
                own_group=asked["start_new_session"] or asked["process_group"] == 0,
                forks_commands=forks_commands,
                cwd=os.fspath(asked["cwd"] or os.getcwd()),
            )
            theirs = (asked[name] for name in ("p2cread", "c2pwrite", "errwrite"))
            # -1 stands for the own one
            fds = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
            process.pid = self.fork(command, fds)
            process._child_created = True
            process._close_pipe_fds(*(asked[name] for name in _PIPES))

        popen._execute_child = execute

    def hear(self) -> Any:
        received = receive(self._connection)
        if received is None:
            raise EOFError("the zygote has ended")
        return received[0]


@dataclass(frozen=True)
class Imports:
    """Imports of a zygote, by the environment that they found and changed.

    In a process with another value of a variable read, the imports would differ.
    """

    seen: Mapping[str, str | None]  # variables read by imported code, as they were before
    made: Mapping[str, str]  # variables that it set

    def equal_those_in(self, env: Mapping[str, str]) -> bool:
        """Tell whether a process has the same imports in this environment, or in a fork's."""
        changed = self.in_a_fork()
        return all(env.get(name) in (was, changed[name]) for name, was in self.seen.items())

    def in_a_fork(self) -> Mapping[str, str | None]:
        """Return what was read, as a fork finds it: its environment has what the imports set."""
        return {name: self.made.get(name, was) for name, was in self.seen.items()}


@dataclass(frozen=True)
class Origin:
    """A forked process has this from its zygote."""

    zygote: Zygote  # a clean one, for processes that this one starts
    imports: Imports
    serves: bool  # whether the zygote is one of servers


# a forked process sets it once, before any code of the command runs
origin: Origin | None = None


def _is_forkable(asked: Mapping[str, Any]) -> bool:
    """Tell whether ``subprocess`` is asked for a command of this Python and nothing else."""
    words = asked["args"]
    if asked["shell"] or isinstance(words, str | bytes | os.PathLike) or len(words) < 3:
        return False
    has_own_state = asked["preexec_fn"] or asked["pass_fds"] or asked["executable"]
    option = words[2] if words[1] == "-u" else words[1]
    return not has_own_state and words[0] == sys.executable and option in ("-m", "-c")


def send(connection: socket.socket, content: Any, fds: Sequence[int] = ()) -> None:
    body = pickle.dumps(content)
    socket.send_fds(connection, [_LENGTH.pack(len(body))], list(fds))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Return a message with its file descriptors, or None after the other side has ended."""
    with contextlib.suppress(ConnectionResetError):
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FDS)
        if head:
            (length,) = _LENGTH.unpack(head)
            body = b"".join(_read(connection, length))
            return pickle.loads(body), fds
    return None


def _read(connection: socket.socket, length: int) -> Iterator[bytes]:
    while length:
        part = connection.recv(length)
        if not part:
            raise EOFError("half a message")
        length -= len(part)
        yield part


def become_subreaper(yes: bool = True) -> None:
    """Make the kernel pass us orphans among our descendants, or again pass us by."""
    _set(_PR_SET_CHILD_SUBREAPER, int(yes))


def end_with_parent() -> None:
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _set(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class Forked:
    """A zygote's child of ours, with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode
