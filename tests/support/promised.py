"""``python -m tests.support.promised``: record the names that users may rely on.

The recorded names are in ``tests/promised.txt``, one a line. The command adds new ones. It drops a
name only if the name was deprecated and its version has come, as ``docs/promises.md`` says.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec
from packaging.version import Version

from harness.starting import ROOT
from sglang_inflight import client
from sglang_inflight.extension import all_extensions
from sglang_inflight.settings import PREFIX, kinds
from sglang_inflight.vocabulary import answers, errors
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.deprecations import DEPRECATED

FILE = ROOT / "tests" / "promised.txt"
VERSION = Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def promised() -> set[str]:
    """Return every promised name, with its kind."""
    return {" ".join(name) for name in (*_of_calls(), *_of_answers(), *_others())}


def recorded() -> set[str]:
    return set(FILE.read_text().splitlines())


def may_go() -> set[str]:
    """Return the names whose deprecation is over."""
    return {
        f"{each.kind} {each.name}" for each in DEPRECATED if Version(each.removed_in) <= VERSION
    }


def has_gone(line: str, over: set[str]) -> bool:
    """Return whether a recorded name was deprecated for as long as is promised."""
    kind, *_, name = line.split()
    return f"{kind} {name}" in over


def _of_calls() -> Iterator[tuple[str, ...]]:
    for call in TABLE.values():
        path = call.path or f"/{call.name}"
        yield "call", call.method, path
        yield from (("field", path, name) for name in call.body.__struct_fields__)
        if call.positional is not None:
            yield "method", f"Engine.{call.name}"


def _of_answers() -> Iterator[tuple[str, ...]]:
    for name, kind in inspect.getmembers(answers, inspect.isclass):
        if issubclass(kind, msgspec.Struct) and kind.__module__ == answers.__name__:
            yield from (("answer", name, field) for field in kind.__struct_fields__)


def _others() -> Iterator[tuple[str, ...]]:
    yield from (("setting", PREFIX + f.name.upper()) for kind in kinds() for f in fields(kind))
    yield from (("client", name) for name in client.__all__)
    yield from (("error", name) for name in errors.ERRORS)
    yield from (("command", name) for each in all_extensions() for name in each.commands)
    yield from (("command", name) for name in _commands())
    # a test compares the dashboard with what servers expose
    drawn: Any = json.loads((ROOT / "dashboards" / "grafana.json").read_text())["panels"]
    text = json.dumps(drawn)
    yield from (("metric", name) for name in re.findall(r"sglang:inflight_\w+", text))


def _commands() -> Iterator[str]:
    from sglang_inflight.cli import app

    for command in app.registered_commands:
        function = command.callback
        assert function is not None
        yield command.name or function.__name__.replace("_", "-")


def write() -> str:
    """Return the file's text: what is there, and what may not go yet."""
    over = may_go()
    kept = {line for line in recorded() if not has_gone(line, over)} if FILE.exists() else set()
    return "".join(f"{line}\n" for line in sorted(promised() | kept))


if __name__ == "__main__":
    FILE.write_text(write())
