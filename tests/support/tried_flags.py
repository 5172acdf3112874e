"""``python -m tests.support.tried_flags``: write which flags of a server our tests and code name.

The doctor reads the written file (``tools/sglang_inflight_tools/tried_flags.py``), because a user
has no tests. A flag counts as tried if a test of servers has it among its strings, or gives it to
an ``Engine``. Unit tests start no servers, so they do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

from harness.starting import ROOT
from sglang_inflight.extension import all_extensions
from sglang_inflight_tools import flags

FILE = ROOT / "tools" / "sglang_inflight_tools" / "tried_flags.py"
SERVERS = ("tests", "harness")
# these decide what a server can do, and whether it starts
DECIDING = ("capabilities.py", "unsupported.py")


def tried(dests: dict[str, str]) -> set[str]:
    """Return the arguments with which tests start servers. ``dests`` has them by their flags."""
    paths = [path for folder in SERVERS for path in (ROOT / folder).rglob("*.py")]
    named = {
        name
        for path in paths
        if "unit" not in path.relative_to(ROOT).parts
        for name in _named(ast.parse(path.read_text()), dests)
    }
    return named & {*dests.values()}


def deciding(dests: dict[str, str]) -> set[str]:
    """Return the arguments of SGLang's that our refusals and capabilities depend on."""
    read = {
        node.attr
        for name in DECIDING
        for node in ast.walk(ast.parse((ROOT / "sglang_inflight" / name).read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("args", "server_args", "settings")
    }
    read |= {name for each in all_extensions() for name in each.serves}
    return read & {*dests.values()}


def _named(tree: ast.Module, dests: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield dests.get(node.value, "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Engine"):
            yield from (keyword.arg or "" for keyword in node.keywords)


def write() -> str:
    """Return the file's text."""
    dests = flags.arguments()
    tables = {"TRIED": tried(dests), "DECIDING": deciding(dests)}
    lines = ['"""Written by ``python -m tests.support.tried_flags``: arguments of SGLang\'s."""']
    for table, names in tables.items():
        rows = "".join(f'        "{name}",\n' for name in sorted(names))
        lines.append(f"{table} = frozenset(\n    {{\n{rows}    }}\n)")
    return "\n\n".join(lines) + "\n"


def main() -> None:
    FILE.write_text(write())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(FILE)], check=True)


if __name__ == "__main__":
    main()
