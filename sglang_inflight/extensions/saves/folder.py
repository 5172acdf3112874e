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
from typing import NamedTuple

import torch

from sglang_inflight.extensions.saves.manifest import (
    MANIFEST,
    Manifest,
    RankPart,
    SavedRank,
    part_file,
    tensors_file,
)
from sglang_inflight.messages import SavedFolderSource
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_safetensors
from sglang_inflight.scheduler.update.sources.disk import Folder, naming
from sglang_inflight.scheduler.update.sources.safetensors_file import SafetensorsFile
from sglang_inflight.tensor_digest import HostReader, TensorDigest
from sglang_inflight.vocabulary.errors import Refused, list_names, shorten

# decoding holds the interpreter; a tensor takes some 100 bytes
_MOST_MANIFEST_BYTES = 4 << 20
_MOST_PART_BYTES = 16 << 20


class SavedTensor(NamedTuple):
    """A tensor on the host, and its line in the digest of its rank."""

    name: str
    tensor: torch.Tensor
    line: str


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
        self.manifest = manifest
        self.saved = saved
        self.part = part
        self._folder = folder
        self._thread = thread
        self._file = os.path.join(folder.path, tensors_file(rank))

    def require_layout(self, layout: Mapping[str, str]) -> None:
        """Raise ``Refused`` with the first fact of ``layout`` that differs."""
        for name in sorted(layout.keys() | self.part.layout.keys()):
            theirs, ours = self.part.layout.get(name), layout.get(name)
            if theirs != ours:
                raise Refused(
                    f"it was saved by a server of another layout: {shorten(name)} is "
                    f"{shorten(str(theirs))!r} there, and {ours!r} here"
                )

    def require_tensors(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Raise ``Refused`` unless the file has the tensors ``wanted``, in shape and dtype."""
        places = self._thread.do(self._read_places)
        if missing := sorted(wanted.keys() - places.keys()):
            raise Refused(f"{list_names([*map(repr, missing)])} is missing")
        if surplus := sorted(places.keys() - wanted.keys()):
            raise Refused(f"{list_names([*map(repr, surplus)])} is no weight of this server")
        if unknown := sorted(wanted.keys() ^ self.part.tensors.keys()):
            raise Refused(f"{list_names([*map(repr, unknown)])} has no digest, or is not there")
        for name, tensor in wanted.items():
            shape, dtype = places[name]
            if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
                raise Refused(
                    f"{name!r} is {dtype} of shape {list(shape)} there, and {tensor.dtype} of "
                    f"shape {list(tensor.shape)} here"
                )

    def read(self, rate_limit: RateLimit, check: Callable[[], None]) -> Iterator[SavedTensor]:
        """Yield each tensor. Raise ``Refused`` with the name of one that was altered."""
        reader = HostReader()
        with closing(read_safetensors([self._file], self._thread, rate_limit)) as tensors:
            for name, tensor in tensors:
                one = TensorDigest(name, tensor)
                for _ in one.read(reader):
                    check()
                if one.hexdigest() != self.part.tensors[name]:
                    raise Refused(
                        f"{name!r} has the digest {one.hexdigest()}, and was saved with "
                        f"{self.part.tensors[name]}"
                    )
                yield SavedTensor(name, tensor, one.line)

    def _read_places(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        name = os.path.basename(self._file)
        with closing(SafetensorsFile(self._file, name)) as file:
            if file.size != self.saved.bytes:
                raise Refused(f"{name} has {file.size} bytes, not {self.saved.bytes}")
            return {place.name: (place.shape, place.dtype) for place in file.places}


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
