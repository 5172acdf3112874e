"""Download the source of an SGLang without installing it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def fetch(version: str, cache: Path) -> Path:
    """Return the parent folder of ``sglang``, unpacked from the wheel of ``version``.

    Raises ``CalledProcessError`` if pip finds no such wheel. pip has printed the reason by then.
    """
    unpacked = cache / f"sglang-{version}"
    if unpacked.is_dir():
        return unpacked
    cache.mkdir(parents=True, exist_ok=True)
    # renamed when complete, so that an interrupted run leaves no partial cache entry
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
