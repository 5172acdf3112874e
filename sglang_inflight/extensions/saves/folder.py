"""Reads weights that another server has saved as it serves them (``manifest.py``).

Each rank reads the files of its own position in the pipeline and in tensor parallelism. A layout
that differs, a name, a shape or a dtype is refused by name before the first tensor is yielded, and
an altered tensor before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import torch

from sglang_inflight.extensions.saves.manifest import (
    MANIFEST,
    Manifest,
    RankPart,
    SavedRank,
    part_file,
    tensors_file,
)
from sglang_inflight.extensions.saves.served_part import (
    Form,
    ServedTensor,
    checked,
    require_layout,
    require_tensors,
)
from sglang_inflight.messages import SavedFolderSource, SavedVersion
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_safetensors
from sglang_inflight.scheduler.update.sources.disk import Folder, naming
from sglang_inflight.scheduler.update.sources.safetensors_file import SafetensorsFile
from sglang_inflight.tensor_digest import HostReader
from sglang_inflight.vocabulary.errors import Refused, list_names

# decoding holds the interpreter; a tensor takes some 100 bytes
_MOST_MANIFEST_BYTES = 4 << 20
_MOST_PART_BYTES = 16 << 20


class SavedFolder:
    """One rank's part of an open folder. Belongs to the staging thread."""

    def __init__(
        self,
        folder: Folder,
        thread: AbandonableThread,
        rank: str,
        manifest: Manifest,
        saved: SavedRank,
        part: RankPart,
    ) -> None:
        self._manifest = manifest
        self._saved = saved
        self._part = part
        self._folder = folder
        self._thread = thread
        self._file = os.path.join(folder.path, tensors_file(rank))

    @property
    def version(self) -> SavedVersion:
        manifest = self._manifest
        return SavedVersion(save_id=manifest.save_id, weight_version=manifest.weight_version)

    @property
    def digest(self) -> str:
        return self._saved.digest

    @property
    def numbers(self) -> Mapping[str, str]:
        return self._part.numbers

    def require(self, layout: Mapping[str, str], wanted: Mapping[str, torch.Tensor]) -> None:
        require_layout(self._part.layout, layout)
        require_tensors(self._thread.do(self._read_forms), wanted)
        if unknown := sorted(wanted.keys() ^ self._part.tensors.keys()):
            raise Refused(f"{list_names([*map(repr, unknown)])} has no digest, or is not there")

    def read(self, rate_limit: RateLimit, check: Callable[[], None]) -> Iterator[ServedTensor]:
        reader = HostReader()
        with closing(read_safetensors([self._file], self._thread, rate_limit)) as tensors:
            for name, tensor in tensors:
                yield checked(name, tensor, self._part.tensors[name], reader, check)

    def _read_forms(self) -> dict[str, Form]:
        name = os.path.basename(self._file)
        with closing(SafetensorsFile(self._file, name)) as file:
            if file.size != self._saved.bytes:
                raise Refused(f"{name} has {file.size} bytes, not {self._saved.bytes}")
            return {place.name: (str(place.dtype), place.shape) for place in file.places}


@contextmanager
def open_saved(
    source: SavedFolderSource, rank: str, check: Callable[[], None]
) -> Iterator[SavedFolder]:
    """Open the part of ``rank``. Raises ``Refused`` if the folder is not whole.

    ``check`` raises when it is time to give up.
    """
    with AbandonableThread(check) as thread:
        folder = thread.do(lambda: Folder(source.model_path, named=source.model_path))
        try:
            with naming(folder):
                read = partial(folder.read_json, MANIFEST, Manifest, _MOST_MANIFEST_BYTES)
                manifest: Manifest = thread.do(read)
                if (saved := manifest.ranks.get(rank)) is None:
                    raise Refused(
                        "it was saved by a server of other ranks: "
                        f"{list_names([*manifest.ranks])}, and this one is {rank}"
                    )
                name = part_file(rank)
                read_part = partial(folder.read_json, name, RankPart, _MOST_PART_BYTES)
                part: RankPart = thread.do(read_part)
                if part.save_id != manifest.save_id:
                    raise Refused(f"{name} is of another save than {MANIFEST}")
                yield SavedFolder(folder, thread, rank, manifest, saved, part)
        finally:
            folder.close()
