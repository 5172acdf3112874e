"""Live owners keep their folders, and folders of dead owners are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_inflight.extensions.workers import folder
from sglang_inflight.extensions.workers.folder import OwnersFolder, remove_abandoned

_OWNER = """
import sys
from sglang_inflight.extensions.workers.folder import OwnersFolder
folder = OwnersFolder()
(folder.path / "calls").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a process with an owner's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        env={**os.environ, "TMPDIR": str(parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_killed_owners_folder_is_removed(parent: Path) -> None:
    with owner(parent) as (process, left):
        remove_abandoned(parent)
        assert (left / "calls").exists()
        process.kill()
        process.wait()
        assert left.exists()
        own = OwnersFolder()
        assert [*parent.iterdir()] == [own.path]


def test_owner_removes_its_folder_on_exit(parent: Path) -> None:
    own = OwnersFolder()
    assert own.path.stat().st_mode & 0o777 == 0o700
    del own
    assert not [*parent.iterdir()]


def test_unfinished_folder_is_not_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp

    def interrupted(prefix: str) -> str:
        made = make(prefix=prefix)
        remove_abandoned(parent)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    own = OwnersFolder()
    assert own.path.exists()


def test_unlockable_folder_is_not_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_locks", lambda opened: False)
    own = OwnersFolder()
    monkeypatch.undo()
    remove_abandoned(parent)
    assert own.path.exists()


def test_foreign_files_are_not_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (parent / "sglang-inflight.link").symlink_to(elsewhere)
    (parent / "sglang-inflight.file").touch()
    (parent / "sglang-inflight-older").mkdir()
    remove_abandoned(parent)
    (parent / "sglang-inflight.theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(parent)
    assert {path.name for path in parent.iterdir()} == {
        "elsewhere",
        "sglang-inflight.link",
        "sglang-inflight.file",
        "sglang-inflight-older",
        "sglang-inflight.theirs",
    }
