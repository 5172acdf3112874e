"""Can a server of the pack be imported here? ``python -m benchmarks.gpu.bare.check_imports``.

Each part's ``why`` names what is missing. With ``--fake-cuda`` torch says that it sees an H100, so
that SGLang and its libraries import what they import there. Nothing is computed in that case.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.bare.contents import EXPECTED, SPARES, WHEELS

# what a server's processes import first, in this order
MODULES = (
    "sglang",
    "sgl_kernel",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen3",
    "sglang.srt.entrypoints.http_server",
    "sglang_inflight.plugin",
)
# SGLang compiles small kernels with them, and has a form without them for those we need
TOOLS = ("nvcc", "ninja", "g++")

NAME, TITLE = "imports", "What a server imports"
PARTS = ("packages", *MODULES, "steps", "plugins")


def fake_cuda() -> None:
    """Let torch say that it sees an H100, in this process."""
    import torch

    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def versions() -> tuple[dict[str, str], list[str]]:
    """Return the versions of what the kit needs, and the names of what is missing."""
    known: dict[str, str] = {"python": sys.version.split()[0]}
    missing = []
    sources = ("sglang", "sglang-kernel", "sglang-inflight", "sglang-inflight-tools")
    for name in (*EXPECTED, *WHEELS, *SPARES, *sources):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    return known, missing


def import_steps() -> None:
    """Import every step, and the runner. Raise ``ImportError`` with the error of each failure."""
    from benchmarks.gpu import steps

    folder = Path(steps.__path__[0])
    names = [f"benchmarks.gpu.steps.{file.stem}" for file in sorted(folder.glob("[!_]*.py"))]
    errors = []
    for name in ("benchmarks.gpu.run", *names):
        try:
            importlib.import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    if errors:
        raise ImportError("; ".join(errors))


def load_plugins() -> list[str]:
    """Install the plugins as a server's process does; return the names of those it found.

    Raises ``ImportError`` with the reason if ours refuses, which ends a server's process.
    """
    from importlib.metadata import entry_points

    from sglang.srt.plugins import load_plugins as load

    try:
        load()
    except SystemExit as refusal:
        raise ImportError(str(refusal)) from refusal
    return [entry.name for entry in entry_points(group="sglang.srt.plugins")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.bare.check_imports", description=TITLE)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--fake-cuda", action="store_true", help="as if an H100 was there")
    options = parser.parse_args()
    _, missing = versions()
    if "torch" in missing:
        sys.exit("torch is missing, and no step runs without it.")

    from benchmarks.gpu.step import Step

    if options.fake_cuda:
        fake_cuda()
    step = Step(NAME, TITLE, PARTS, out=options.out)
    with step.part("packages") as values:
        known, missing = versions()
        values |= known | {tool: "there" if shutil.which(tool) else "not there" for tool in TOOLS}
        if missing:
            raise ModuleNotFoundError(f"these are missing: {', '.join(missing)}")
    for module in MODULES:
        with step.part(module):
            importlib.import_module(module)
    with step.part("steps"):
        import_steps()
    with step.part("plugins") as values:
        values["found"] = ", ".join(load_plugins())
        if "inflight" not in values["found"]:
            raise ModuleNotFoundError("SGLang finds no entry point of ours")
    # threads of some libraries would keep a process that has only imported them
    sys.stdout.flush()
    os._exit(step.failed)


if __name__ == "__main__":
    main()
