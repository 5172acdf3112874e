"""Reads the sparse tensors of a folder, by its manifest (``vocabulary/sparse.py``).

All files are read and
compared with the manifest before a loader gets the first tensor. So a damaged folder changes no
weight, not even one that is written in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from sglang_inflight.messages import SparseFolderSource
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.checkpoint_files import Expected, read_verified
from sglang_inflight.scheduler.update.sources.disk import Folder, naming
from sglang_inflight.scheduler.update.sources.sparse import refuse_halves
from sglang_inflight.vocabulary.errors import Conflict, Refused, list_names, shorten
from sglang_inflight.vocabulary.sparse import MANIFEST, Manifest

_SUFFIX = ".safetensors"
# decoding holds the interpreter
_MOST_MANIFEST_BYTES = 4 << 20


def read_sparse_folder(
    source: SparseFolderSource,
    device: torch.device,
    *,
    base_version: str,
    require_base: Callable[[tuple[str, ...]], None],
    refuse_another: Callable[[Folder], None],
    check: Callable[[], None],
    rate_limit: RateLimit,
) -> Weights:
    """Yield the folder's tensors, ordered by their names, moved to ``device`` one by one.

    ``base_version`` is the version that the update changes, and ``require_base`` raises
    ``Conflict`` unless it has one of the given digests. Raises ``Conflict`` if the manifest
    names another one, and ``Refused`` with a file's name if that file is missing, surplus, or not
    as the manifest says. ``refuse_another`` gets the folder first, and ``check`` raises when it is
    time to give up.
    """
    with AbandonableThread(check) as thread:
        folder = thread.do(lambda: Folder(source.model_path, named=source.model_path))
        try:
            with naming(folder):
                thread.do(lambda: refuse_another(folder))
                manifest = thread.do(
                    lambda: folder.read_json(MANIFEST, Manifest, _MOST_MANIFEST_BYTES)
                )
                if manifest.base_version != base_version:
                    raise Conflict(
                        f"base_version in {MANIFEST} is {shorten(manifest.base_version)!r}, but "
                        f"{base_version!r} is serving"
                    )
                if manifest.base_digests:
                    require_base(manifest.base_digests)
                expected = thread.do(lambda: _find_files(folder, manifest))
                for name, tensor in read_verified(expected, refuse_halves, thread, rate_limit):
                    yield name, tensor.to(device)
        finally:
            folder.close()


def _find_files(folder: Folder, manifest: Manifest) -> list[Expected]:
    """Return the manifest's files. Raise ``Refused`` if the folder has others."""
    for name in manifest.files:
        if os.path.basename(name) != name or not name.endswith(_SUFFIX):
            raise Refused(
                f"{MANIFEST}: {shorten(name)!r} is not the name of a {_SUFFIX} file in it"
            )
    found = {name for name in os.listdir(folder.path) if name.endswith(_SUFFIX)}
    if missing := sorted(manifest.files.keys() - found):
        raise Refused(f"{list_names([*map(repr, missing)])} of {MANIFEST} is missing")
    if surplus := sorted(found - manifest.files.keys()):
        raise Refused(f"{list_names([*map(repr, surplus)])} is not in {MANIFEST}")
    return [
        Expected(os.path.join(folder.path, name), file.bytes, file.sha256)
        for name, file in manifest.files.items()
    ]
