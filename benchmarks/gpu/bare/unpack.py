"""Unpack a pack into a folder for ``PYTHONPATH``: ``python unpack.py PACK FOLDER``.

Only the standard library is used, because nothing else may be there.
"""

from __future__ import annotations

import json
import platform
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

LIST = "pack.json"
ARCHIVES = ("sglang.tar.xz", "project.tar.xz")


def unpack(pack: Path, folder: Path) -> list[str]:
    """Unpack ``pack`` into ``folder``; return the wheels that this machine did not need.

    Raises ``RuntimeError`` if the pack is for another Python.
    """
    wanted = json.loads((pack / LIST).read_text())["python"]
    here = ".".join(platform.python_version_tuple()[:2])
    if (here, platform.machine()) != (wanted, "x86_64"):
        raise RuntimeError(
            f"The pack is for Python {wanted} on x86_64, and this is Python {here} on "
            f"{platform.machine()}."
        )
    unneeded = []
    for wheel in sorted((pack / "wheels").glob("*.whl")):
        unpack_wheel(wheel, folder)
    for wheel in sorted((pack / "spares").glob("*.whl")):
        if has(wheel.name.split("-")[0]):
            unneeded.append(wheel.name)
        else:
            unpack_wheel(wheel, folder)
    unpack_archives(pack, folder)
    return unneeded


def unpack_archives(pack: Path, folder: Path) -> None:
    """Unpack SGLang's sources and the project, which suit every Python."""
    for name in ARCHIVES:
        with tarfile.open(pack / name) as archive:
            archive.extractall(folder, filter="data")


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Unpack a wheel's importable files; commands are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = importable(member.filename)
            if target is not None and not member.is_dir():
                member.filename = target
                archive.extract(member, folder)


def importable(name: str) -> str | None:
    """Return where the wheel's file ``name`` belongs below the import path, or None."""
    parts = PurePosixPath(name).parts
    if not parts[0].endswith(".data"):
        return name
    return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None


def has(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    left = unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"The machine's own packages were kept in place of {len(left)} wheels.")
