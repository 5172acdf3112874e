"""Forked processes of the tests equal started ones, except for their imports."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import sglang
import torch
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.plugins import hook_registry

from harness import forking
from harness.starting import ROOT, Process, end, start
from sglang_inflight.livepatch import series
from sglang_inflight.livepatch.places import Places
from sglang_inflight.livepatch.series import Series
from tests.families.row import ENV
from tests.support.load import until

TELL = """
import json, os, signal, sys
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "cores": sorted(os.sched_getaffinity(0)),
    "parent": os.getppid(),
    "leads its group": os.getpgrp() == os.getpid(),
    "threads": len(os.listdir("/proc/self/task")),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
}))
"""

TELL_PLUGINS = """
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry
print([plugins._plugins_loaded, len(HookRegistry._hooks)])
"""

# starts a child the way torchrun starts its processes
COMMANDS = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-u", "-c", sys.argv[1], "one", "two"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
)
said, _ = child.communicate("three\\n")
print(said.strip(), child.returncode)
"""

TELL_IMPORTS = """
import os, sys
has_imports = "sglang.srt.managers.scheduler" in sys.modules
leads = os.getpgrp() == os.getpid()
print(has_imports, sys.argv[1:], input(), leads, file=sys.stderr)
sys.exit(7)
"""

# starts a child the way a server starts its ranks
PARENT = """
import multiprocessing, os, sys, time

def %(name)s(tell):
    tell.send(os.getppid())
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    told, tell = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=%(name)s, args=(tell,))
    child.start()
    print(child.pid, told.recv(), flush=True)
    child.join()
    print(child.exitcode, flush=True)
    sys.exit(5)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def run(
    log: Path, *arguments: str, fresh: bool = False, forks_commands: bool = False, **env: str
) -> Process:
    with log.open("wb") as output:
        return start(
            arguments,
            output=output,
            env=env,
            cwd=log.parent,
            fresh=fresh,
            forks_commands=forks_commands,
        )


def said(log: Path, process: Process) -> str:
    assert process.wait(60) == 0, log.read_text()
    return log.read_text().splitlines()[-1]


@pytest.fixture
def parent(log: Path, request: pytest.FixtureRequest) -> Any:
    """A process waiting for a child, the child's id, and the child's parent's id.

    The child runs a function with the name that the test gives as a parameter.
    """
    name = getattr(request, "param", "sleep")
    (log.parent / "the_parent.py").write_text(PARENT % {"name": name})
    process = run(log, "-m", "the_parent")
    until("the child is there", lambda: log.read_text().endswith("\n"))
    child, its_parent = map(int, log.read_text().split())
    yield process, child, its_parent
    end(process)


def test_forked_process_equals_a_fresh_one(log: Path) -> None:
    command = ("-c", TELL, "one", "two")
    env: dict[str, Any] = {"PYTHONPATH": "/nowhere", "INFLIGHT_OF_THIS_TEST": "1"}
    fresh = json.loads(said(log, run(log, *command, fresh=True, **env)))
    forked = json.loads(said(log, run(log, *command, **env)))
    # imports may add to the environment and to the path
    assert fresh.pop("environment").items() <= forked.pop("environment").items()
    path = fresh.pop("path")
    assert forked.pop("path")[: len(path)] == path
    assert forked == fresh


def test_forked_process_has_no_plugin_loaded(log: Path) -> None:
    assert json.loads(said(log, run(log, "-c", TELL_PLUGINS)).lower()) == [False, 0]


def test_forked_process_reports_its_exit_code(log: Path) -> None:
    assert run(log, "-c", "raise SystemExit(3)").wait(60) == 3
    killed = run(log, "-c", "import time; time.sleep(600)")
    assert killed.poll() is None
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL


def test_forked_process_is_the_parent_of_its_children(
    log: Path, parent: tuple[Process, int, int]
) -> None:
    process, child, its_parent = parent
    assert its_parent == process.pid
    assert child in {found.pid for found in psutil.Process(process.pid).children()}
    os.kill(child, signal.SIGKILL)
    assert process.wait(60) == 5
    assert log.read_text().endswith(f"\n{-signal.SIGKILL}\n")


def test_end_kills_the_forked_process_and_its_children(parent: tuple[Process, int, int]) -> None:
    process, child, _ = parent
    end(process)
    assert not psutil.pid_exists(process.pid)
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize(
    ("parent", "zygotes"), [("sleep", 1), ("run_scheduler_process", 0)], indirect=["parent"]
)
def test_scheduler_keeps_a_zygote_in_vain(parent: tuple[Process, int, int], zygotes: int) -> None:
    """SGLang's schedulers start no processes."""
    _, child, _ = parent
    assert len(psutil.Process(child).children()) == zygotes


@pytest.mark.parametrize("forks_commands", [True, False])
def test_command_of_a_forked_process_is_forked_on_request(log: Path, forks_commands: bool) -> None:
    process = run(log, "-c", COMMANDS, TELL_IMPORTS, forks_commands=forks_commands)
    assert said(log, process) == f"{forks_commands} ['one', 'two'] three True 7"


def test_command_with_other_imports_is_not_forked(log: Path) -> None:
    changed = COMMANDS.replace("import subprocess, sys", "import os, subprocess, sys", 1)
    changed = changed.replace("child =", "os.environ['TORCHDYNAMO_DISABLE'] = '0'\nchild =", 1)
    process = run(log, "-c", changed, TELL_IMPORTS, forks_commands=True)
    assert said(log, process) == "False ['one', 'two'] three True 7"


by_a_worker = pytest.mark.skipif(
    forking.origin is None,
    reason="this process is no worker of pytest-xdist, which would be a fork",
)


@by_a_worker
def test_worker_has_what_only_servers_of_tests_have() -> None:
    """Unit tests look at SGLang and at our patches as users have them."""
    assert forking.origin is not None
    assert not forking.origin.serves
    assert not hasattr(EagerRunner.execute, "__wrapped__")
    assert Series.plan.__module__ == series.__name__
    assert not isinstance(getattr(hook_registry._propagate_patch, "__self__", None), Places)


@by_a_worker
def test_workers_servers_import_anew(log: Path) -> None:
    """A fork has each module at its parent's address."""
    addresses = "import sglang, torch; print(id(sglang), id(torch))"
    assert said(log, run(log, "-c", addresses)) == f"{id(sglang)} {id(torch)}"


def test_process_of_a_fork_imports_anew(log: Path) -> None:
    """Such a fork is a test's script that starts servers."""
    nested = """
from harness.starting import start
import sglang, sys
print(id(sglang), flush=True)
child = start(["-c", "import sglang; print(id(sglang))"], output=sys.stdout)
assert child.wait(60) == 0
"""
    said(log, run(log, "-c", nested, PYTHONPATH=str(ROOT)))
    mine, childs = log.read_text().split()
    assert mine == childs


# their zygote serves this test, too
@pytest.mark.xdist_group("0 test_families")
def test_zygote_imports_with_interpreted_kernels_on_request(log: Path) -> None:
    """Triton decides at a module's import whether its kernels are compiled."""
    tell = (
        "from sglang.srt.mem_cache import allocation;"
        "print(type(allocation.assign_req_to_token_pool).__name__)"
    )
    asked: dict[str, Any] = {name: ENV[name] for name in ("TRITON_INTERPRET", "MALLOC_PERTURB_")}
    assert said(log, run(log, "-c", tell, **asked)) == "InterpretedFunction"
    assert said(log, run(log, "-c", tell)) == "JITFunction"
