"""Install copies of the package, each without some extensions' folders.

``python -m tests.support.extension_folders FOLDER`` reads ``[names, environment]`` per copy from
its input, as JSON: the extensions that a copy keeps, and variables. It writes what ``look`` finds
in each copy. SGLang is imported once, because a fork of this process installs each copy.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.starting import ROOT

NAME = "sglang_inflight"


def copy_package(folder: Path, kept: Iterable[str]) -> None:
    """Make ``folder/sglang_inflight`` with the extensions ``kept``, by links."""
    package = folder / NAME
    (package / "extensions").mkdir(parents=True)
    (folder / "patches").symlink_to(ROOT / "patches")
    for path in (ROOT / NAME).iterdir():
        if path.name != "extensions":
            (package / path.name).symlink_to(path)
    for name in ("__init__.py", *kept):
        (package / "extensions" / name).symlink_to(ROOT / NAME / "extensions" / name)


def look() -> dict[str, Any]:
    """Install, and return hooks as target and kind, extensions that are on, imported modules."""
    from sglang_inflight import plugin
    from sglang_inflight.settings import extensions_on

    plugin.install()
    imported = [name for name in sys.modules if name.startswith(f"{NAME}.extensions.")]
    return {
        "on": [each.name for each in extensions_on()],
        "imported": sorted(imported),
        "hooks": [(target, kind.name) for target, _, kind in plugin.every_hook()],
    }


def _look_in_a_fork(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
                del sys.modules[name]
            sys.path.insert(0, str(folder))
            os.environ.update(environment)
            with os.fdopen(send, "w") as sink:
                json.dump(look(), sink)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as source:
        text = source.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the package in {folder} cannot be installed")
    found: dict[str, Any] = json.loads(text)
    return found


def main(folder: Path) -> None:
    # for the forks: whatever our modules import of SGLang
    from sglang_inflight.livepatch.series import load_series
    from sglang_inflight.plugin import every_hook

    every_hook()
    # each copy plans the same patches of the same modules; nothing writes into a parsed module
    ast.parse = functools.cache(ast.parse)  # type: ignore[assignment]
    series = load_series()
    # a zygote keeps the plan of the series itself, and would parse nothing
    series.within(series.root).plan()
    # a collection in a fork would copy and visit all that SGLang's import has made
    gc.disable()
    gc.freeze()
    answers = []
    for number, (kept, environment) in enumerate(json.load(sys.stdin)):
        copy_package(folder / str(number), kept)
        answers.append(_look_in_a_fork(folder / str(number), environment))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
