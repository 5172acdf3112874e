"""``python -m harness.porting VERSION``: list the work of porting to that SGLang.

The source comes from pip's wheel, which is not installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from harness.porting.survey import Survey, survey
from harness.porting.uses import NoMypy
from sglang_inflight.cache import default_cache

NEWEST = "newest"
# heads of the report, in the order of mending
_HEADS = {
    "patch": "Patches",
    "hook": "Hooks",
    "use": "Uses of SGLang",
    "test": "Uses of SGLang in tools, tests, benchmarks and examples",
}


def main(words: list[str] | None = None) -> int:
    """Examine a version. Exit code 0: everything needed by a server fits."""
    parser = argparse.ArgumentParser(prog="python -m harness.porting")
    parser.add_argument("version", help="SGLang's version, as pip names it, or `newest`")
    parser.add_argument(
        "--source", type=Path, help="parent folder of `sglang`, instead of pip's wheel"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache() / "porting", help="folder of unpacked wheels"
    )
    given = parser.parse_args(words)
    if given.source is not None and not (given.source / "sglang").is_dir():
        parser.error(f"{given.source} holds no folder `sglang`")
    if given.version == NEWEST:
        given.version = newest()
    try:
        root = given.source or fetch(given.version, given.cache)
    except subprocess.CalledProcessError:
        print(f"pip has no wheel of sglang=={given.version} for this Python", file=sys.stderr)
        return 2
    try:
        found = survey(root, given.version, given.cache / f"mypy-{given.version}")
    except NoMypy as error:
        print(f"mypy does not run: {error}", file=sys.stderr)
        return 2
    print("\n".join(describe(found)))
    return 1 if found.keeps_a_server_from_running else 0


def newest() -> str:
    """Return the newest version that pip knows. Raises ``CalledProcessError`` if it knows none."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    said = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    found = re.match(r"sglang \((\S+)\)", said)
    assert found is not None, said
    return found[1]


def describe(found: Survey) -> list[str]:
    lines = [f"SGLang {found.version}, with the patches of {found.series}", ""]
    for kind, head in _HEADS.items():
        of_kind = [finding for finding in found.findings if finding.kind == kind]
        misfits = [finding for finding in of_kind if not finding.fits]
        # mypy lists only misfits
        fit = f"{len(misfits)} break" if kind in ("use", "test") else None
        lines.append(f"{head}: {fit or f'{len(of_kind) - len(misfits)} of {len(of_kind)} fit'}")
        for finding in misfits:
            lines.append(f"  {finding.name}: {finding.reason}")
            lines += [f"    {hint}" for hint in found.hints.get(finding.name, [])]
    lines += ["", "docs/porting.md says what to do." if found.misfits else "All of it fits."]
    return lines


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


if __name__ == "__main__":
    sys.exit(main())
