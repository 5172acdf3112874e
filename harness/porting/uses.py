"""Check every use of SGLang, by mypy on our tree beside another SGLang's source.

mypy reads both trees and imports neither. The run is not strict, and what is not installed, such
as torch, is ``Any``: so the errors are the same with torch and without. mypy does not see that
bodies name classes by a string, so these names are looked up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

import sglang_inflight
from harness.porting import Finding, Kind
from sglang_inflight_tools.source_tree import SourceTree

HOUSE = Path(sglang_inflight.__file__).parent
# beside the package in its repository; a server needs none of them
DEVELOPERS = ("tools", "harness", "tests", "benchmarks", "examples")
_PLUGIN = Path(__file__).with_name("annotated.py")
# ignored errors that must exist there: members that SGLang makes at run time
_WITH_IGNORES = "sglang_types.py"

_CONFIG = """\
[mypy]
python_version = 3.11
plugins = {plugin}
mypy_path = {root}
ignore_missing_imports = True
warn_unused_ignores = True
disable_error_code = valid-type, var-annotated
{branch} = IS_0_5_22
[mypy-sglang.*]
follow_imports = silent
ignore_missing_imports = False
implicit_reexport = True
[mypy-torch.*,triton.*,transformers.*,numpy.*,scipy.*]
follow_imports = skip
[mypy-tests.attention_dp.*,tests.experts.*,tests.speculation.*]
disable_error_code = assignment, method-assign
"""
# the module of the classes that bodies name (``vocabulary/bodies.py``)
_MESSAGES = "sglang.srt.managers.io_struct"
_NAMED = re.compile(r'^    sglang = "(\w+)"$', re.M)
_NAMES = (
    re.compile(r'Module "(?P<owner>[\w.]+)" has no attribute "(?P<name>\w+)"'),
    re.compile(r'"[^"]+" has no attribute "(?P<name>\w+)"'),
    re.compile(r'(?:module named|Skipping analyzing) "(?P<name>sglang[\w.]*)"'),
)


class NoMypy(Exception):
    """mypy did not run. The text is its own."""


def look_at_uses(
    root: Path, version: str, cache: Path, house: Path = HOUSE, beside: Sequence[str] = DEVELOPERS
) -> list[Finding]:
    """Return a finding for each use of SGLang in ``house`` that breaks; none for those that fit.

    ``root`` is the parent folder of ``sglang``. ``beside`` names folders beside ``house`` to check,
    too. ``cache`` is for mypy. Raises ``NoMypy`` if mypy is not installed or refuses to run.
    """
    folders = [name for name in (house.name, *beside) if (house.parent / name).is_dir()]
    branch = "always_true" if Version(version) < Version("0.5.23") else "always_false"
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "mypy.ini")
        config.write_text(_CONFIG.format(plugin=_PLUGIN, root=root.resolve(), branch=branch))
        words = ["--config-file", str(config), "--cache-dir", str(cache), "--output", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *words, *folders],
            cwd=house.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    # 1: there are errors
    if done.returncode not in (0, 1) or done.stderr:
        raise NoMypy(done.stderr or done.stdout)
    # beside errors there is a summary in words
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = (_read(json.loads(line), house) for line in lines)
    return [finding for finding in found if finding is not None]


def look_at_bodies(tree: SourceTree, house: Path = HOUSE) -> list[Finding]:
    """Return a finding for each missing class of SGLang that a body of ours names by a string."""
    names = {name for file in house.rglob("*.py") for name in _NAMED.findall(file.read_text())}
    classes = [f"{_MESSAGES}.{name}" for name in sorted(names)]
    return [
        Finding("use", dotted, "it is not there", (dotted,))
        for dotted in classes
        if tree.find(dotted) is None
    ]


def _read(error: dict[str, str], house: Path) -> Finding | None:
    file, message = error["file"], error["message"]
    if error["severity"] != "error":
        return None
    if error["code"] == "unused-ignore" and Path(file).name != _WITH_IGNORES:
        return None
    kind: Kind = "use" if Path(file).parts[0] == house.name else "test"
    return Finding(kind, f"{file}:{error['line']}", message, tuple(_upstream(message)))


def _upstream(message: str) -> list[str]:
    """Return the missing name of SGLang's in ``message``, dotted where mypy says its module."""
    for pattern in _NAMES:
        if found := pattern.search(message):
            parts = found.groupdict()
            return [".".join(filter(None, (parts.get("owner"), parts["name"])))]
    return []
