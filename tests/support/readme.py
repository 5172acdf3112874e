"""The README's commands and code, and the test that runs each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from harness.starting import ROOT

README = ROOT / "README.md"
PROGRAMS = ("curl", "make", "pip", "python", "sglang", "sglang-inflight", "torchrun")
CI = ".ci/run"

_SERVER = "tests/test_readme.py::test_readmes_update_reaches_a_request_of_its_server"
_PIP = "tests/unit/test_readme.py::test_readmes_installation_fails_in_a_clone"
# The demo takes minutes, so its test is one of make test-slow. The test of make rl takes two ways
# and two steps of each.
RUN_BY = {
    "make demo": "tests/test_readme.py::test_demo_fails_a_check_of_its_own",
    "pip install ./client .": _PIP,
    "pip install ./tools": _PIP,
    "pip install ./client": _PIP,
    "sglang serve": _SERVER,
    "curl": _SERVER,
    "make rl": "tests/test_async_grpo.py::test_async_grpo_example_trains_and_reports",
    "sglang-inflight replay": (
        "tests/extensions/replay/test_replay.py::test_command_replays_a_folder"
    ),
    "sglang-inflight fleet --catch-up": (
        "tests/extensions/saves/test_returning_servers.py"
        "::test_killed_server_comes_back_to_its_fleet_without_a_trainer"
    ),
    "sglang-inflight status": (
        "tests/test_cli.py::test_pause_update_and_rollback_commands_work_under_load"
    ),
    "make docs": CI,
}
# the Python, by a part of it
CODE_RUN_BY = {
    " Sender(client)": "tests/test_readme.py::test_readmes_trainer_makes_each_step_a_version",
    " ShardSender(fleet)": (
        "tests/extensions/shards/test_readme_trainer.py"
        "::test_readmes_sharded_trainer_makes_each_step_a_version"
    ),
}


def blocks() -> list[tuple[str, str]]:
    """Return the language and the text of each block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found]


def commands() -> list[list[str]]:
    """Return the words of each command, in blocks and in sentences, without comments."""
    lines = [
        line
        for language, text in blocks()
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    # the name of a program alone is no command
    inline = (text for text in re.findall(r"`([^`\n]+)`", prose) if " " in text)
    lines += [text for text in inline if text.split()[0] in PROGRAMS]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def command(start: str) -> list[str]:
    """Return the words of the only command that begins with ``start``."""
    (words,) = (words for words in commands() if shlex.join(words).startswith(start))
    return words


def code(part: str, changes: Mapping[str, str]) -> str:
    """Return the only Python that has ``part``, with each text of ``changes`` replaced."""
    (found,) = (text for language, text in blocks() if language == "python" and part in text)
    for old, new in changes.items():
        assert old in found, old
        found = found.replace(old, new)
    return found
