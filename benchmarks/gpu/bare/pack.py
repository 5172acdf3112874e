"""Make the pack: ``python -m benchmarks.gpu.bare.pack FOLDER``."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path, PurePath

from benchmarks.gpu.bare import contents, stubs, unpack

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent

# distributions of which the pack has the Python sources, not the wheel
SGLANG, KERNELS = "sglang", "sglang-kernel"
# distributions of the repository
OURS = ("sglang-inflight", "sglang-inflight-tools")


def make(folder: Path, *, lean: bool = False) -> None:
    """Make the pack in ``folder``, check its size and its imports, and print what is in it.

    A ``lean`` pack has no spares. Raises ``ValueError`` if ``folder`` holds something else than an
    earlier pack, or if the pack is too large; ``subprocess.CalledProcessError`` if pip does not
    find a wheel; ``ImportError`` if something is missing.
    """
    _empty(folder)
    download(contents.WHEELS, folder / "wheels")
    if not lean:
        download(contents.SPARES, folder / "spares")
    sglang, project = unpack.ARCHIVES
    with tarfile.open(folder / sglang, "w:xz") as archive:
        add_sglang(archive)
    with tarfile.open(folder / project, "w:xz") as archive:
        add_project(archive)
    for name in ("unpack.py", "../bare.sh"):
        shutil.copy(HERE / name, folder)
    (folder / "commit").write_text(_commit() + "\n")
    by_file = contents.sizes(folder)
    facts = {"python": contents.PYTHON, "sglang": version(SGLANG), "bytes": by_file}
    (folder / unpack.LIST).write_text(json.dumps(facts, indent=1) + "\n")
    for name, size in by_file.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total = contents.check_size(contents.sizes(folder))
    print(f"{total / 2**20:8.2f} MiB  of {contents.MOST_BYTES / 2**20:.0f} MiB: {folder}")
    check_imports(folder)


def download(names: Iterable[str], folder: Path) -> None:
    """Download the wheels of the installed versions, for the bare machine's Python."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--implementation", "cp"),
            *("--python-version", contents.PYTHON),
            *(f"--platform={platform}" for platform in contents.PLATFORMS),
            *("--dest", str(folder)),
            *(f"{name}=={version(name)}" for name in names),
        ],
        check=True,
    )


def add_sglang(archive: tarfile.TarFile) -> None:
    """Add SGLang's sources, those of its kernels' Python side, and the stubs."""
    package = _package(SGLANG, "sglang")
    for file in contents.sglang_files(package):
        _add_file(archive, file, file.relative_to(package.parent))
    package = _package(KERNELS, "sgl_kernel")
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package.parent)
        ours = inside == PurePath("sgl_kernel/load_utils.py")
        _add_file(archive, HERE / "kernels.py" if ours else file, inside)
    for name in (SGLANG, KERNELS):
        _add_metadata(archive, name)
    for package_name, submodules in contents.STUBS.items():
        for path, text in stubs.stub_files(package_name, submodules).items():
            _add(archive, text.encode(), path)


def add_project(archive: tarfile.TarFile) -> None:
    """Add the repository's files, and what its installed distributions say of their entry points.

    A package of ``tools`` is at the top, from where it is imported.
    """
    for file in contents.project_files(ROOT):
        inside = file.relative_to(ROOT)
        is_tool = inside.parts[0] == "tools"
        _add_file(archive, file, inside.relative_to("tools") if is_tool else inside)
    for name in OURS:
        _add_metadata(archive, name)


def check_imports(pack: Path) -> None:
    """Import what a server imports from the pack, as if a card was there.

    Python sees no installed distribution but those of the pack and those that the bare machine
    is expected to have. Wheels for this Python are linked in place of the pack's.
    """
    with tempfile.TemporaryDirectory() as temporary:
        sources, installed = Path(temporary, "sources"), Path(temporary, "installed")
        found = Path(temporary, "imports.json")
        unpack.unpack_archives(pack, sources)
        installed.mkdir()
        link_distributions(bare_distributions(), installed)
        subprocess.run(
            [
                *(sys.executable, "-S", "-m", "benchmarks.gpu.bare.check_imports"),
                *("--fake-cuda", "--out", str(found)),
            ],
            check=False,
            cwd=temporary,
            env={
                **os.environ,
                "PYTHONPATH": f"{sources}:{installed}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "SGLANG_PLUGINS": "inflight",
            },
        )
        if not found.exists():
            raise ImportError("The check of the pack's imports ended before it said anything.")
        parts = json.loads(found.read_text())["parts"]
    failed = [f"{name}: {part['why']}" for name, part in parts.items() if part["state"] != "ran"]
    if failed:
        raise ImportError("The pack does not import. " + "; ".join(failed))
    print("A server of the pack imports, as far as that can be seen without a card.")


def bare_distributions() -> set[str]:
    """Return the pack's distributions, those the bare machine has, and what the latter require."""
    found: set[str] = set()
    waiting = [*contents.EXPECTED]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            # a requirement of another system
            continue
        found.add(name)
        waiting += required(requires)
    return found | {_normal(name) for name in (*contents.WHEELS, *contents.SPARES)}


def required(requirements: Iterable[str]) -> list[str]:
    """Return the names in ``requirements``, without those of extras.

    >>> required(["jinja2>=3", 'pytest; extra == "test"', "cuda-toolkit[nvrtc]==13.0"])
    ['jinja2', 'cuda-toolkit']
    """
    names = []
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None and not re.search(r"\bextra\s*==", requirement):
            names.append(name[0])
    return names


def link_distributions(names: Iterable[str], folder: Path) -> None:
    """Link the top-level modules and the metadata of installed distributions into ``folder``.

    A package is linked as a whole, because its extensions find libraries beside them. A namespace
    thus shows the parts of other distributions, too.
    """
    for name in names:
        found = distribution(name)
        tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
        for top in tops:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(Path(str(found.locate_file(top))))


def _empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / unpack.LIST).exists():
        raise ValueError(f"{folder} holds something else than a pack.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # an interrupted pack is one, too
    (folder / unpack.LIST).write_text("{}\n")


def _commit() -> str:
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _package(name: str, package: str) -> Path:
    return Path(str(distribution(name).locate_file(package)))


def _add_metadata(archive: tarfile.TarFile, name: str) -> None:
    found = distribution(name)
    for file in contents.metadata_files(found.files or []):
        _add_file(archive, Path(str(found.locate_file(file))), file)


def _add_file(archive: tarfile.TarFile, file: Path, name: PurePath) -> None:
    _add(archive, file.read_bytes(), str(name))


def _add(archive: tarfile.TarFile, content: bytes, name: str) -> None:
    """Add a file without an owner or a time, so that equal sources make equal archives."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(content))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.bare.pack", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu-pack"))
    parser.add_argument("--lean", action="store_true", help="without spares")
    options = parser.parse_args(arguments)
    try:
        make(options.folder, lean=options.lean)
    except (ValueError, ImportError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
