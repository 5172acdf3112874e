"""Write what a version changes into a folder, for an update from disk.

``vocabulary/sparse.py`` has its form. The manifest comes last: a folder without one is not whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang_inflight.client.changes import in_halves
from sglang_inflight.vocabulary.sparse import MANIFEST, Manifest, ManifestFile

if TYPE_CHECKING:
    import torch

    from sglang_inflight.client.changes import NamedTensor

FILE_BYTES = 1 << 30
_NAME = "changes-{}.safetensors"


def write_changes(
    folder: str | os.PathLike[str],
    changes: Iterable[NamedTensor],
    *,
    base_version: str,
    base_digests: Iterable[str] = (),
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write ``changes``, as ``changes_since`` yields them, and return the manifest's path.

    ``base_version`` is the label of the version that the changes were found against.
    ``base_digests`` are digests of that version, ``receipt.ranks[0].digest`` of its update: one for
    each layout of servers. A server that serves none of them takes no changes. A file takes
    at most ``file_bytes``, or the changes of one larger tensor. The changes of one file are held in
    memory. Each file appears under its name when it is whole. ``folder`` is made if missing. Files
    that an earlier call left without a manifest are removed.

    Raises ``FileExistsError`` if ``folder`` has a manifest: a reader may be reading it. Raises
    ``ValueError`` if ``changes`` lacks half of a change. A server refuses NaN and infinity.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise FileExistsError(f"{folder / MANIFEST} exists: write each version to its own folder")
    for left in folder.glob(_NAME.format("*")):
        left.unlink()
    files: dict[str, ManifestFile] = {}
    for number, part in enumerate(_parts(changes, file_bytes), 1):
        path = folder / _NAME.format(f"{number:05d}")
        with _appearing_whole(path) as unfinished:
            save_file(part, unfinished)
            files[path.name] = _describe(unfinished)
    manifest = Manifest(
        format="sglang-inflight-sparse",
        format_version=1,
        base_version=base_version,
        files=files,
        base_digests=tuple(base_digests),
    )
    with _appearing_whole(folder / MANIFEST) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return folder / MANIFEST


def _parts(changes: Iterable[NamedTensor], most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for halves in in_halves(changes):
        nbytes = sum(tensor.nbytes for _, tensor in halves)
        if part and size + nbytes > most_bytes:
            yield part
            part, size = {}, 0
        part |= {name: tensor.detach().cpu().contiguous() for name, tensor in halves}
        size += nbytes
    if part:
        yield part


@contextmanager
def _appearing_whole(path: Path) -> Iterator[Path]:
    """Give the block another path to write to, and rename that file to ``path`` at the end.

    safetensors lets no other user read its files, and a server may run as one. So the file gets
    the permissions of any new file.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _describe(path: Path) -> ManifestFile:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ManifestFile(sha256=sha256, bytes=path.stat().st_size)
