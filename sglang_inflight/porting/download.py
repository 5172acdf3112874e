"""The source of an SGLang that is not installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def fetch(version: str, cache: Path) -> Path:
    """The folder with ``sglang``, unpacked from the wheel of ``version``. Installs nothing.

    Raises ``CalledProcessError`` where pip finds no such wheel; it has said why then.
    """
    unpacked = cache / f"sglang-{version}"
    if unpacked.is_dir():
        return unpacked
    cache.mkdir(parents=True, exist_ok=True)
    # renamed when it is whole, so that what an interrupted run leaves is not taken for it
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        where = ["--dest", scratch, "--only-binary", ":all:", "--no-deps", "--quiet"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *where, f"sglang=={version}"], check=True
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(Path(scratch, "source"), names)
        Path(scratch, "source").rename(unpacked)
    return unpacked
