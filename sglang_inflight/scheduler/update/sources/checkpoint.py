"""Reads the names and shapes of a local checkpoint's tensors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang_inflight.scheduler.update.sources.safetensors_file import SafetensorsFile

Shapes = dict[str, tuple[int, ...]]


def read_shapes(model_path: str, *, revision: str | None, cache: str | None) -> Shapes:
    """Return shapes by name; empty if the checkpoint is not here or not in safetensors.

    ``model_path`` is a directory or a name on the Hub. The files of a name are looked up in
    ``cache`` (None: the Hub's own) and never fetched.
    """
    shapes: Shapes = {}
    for file in sorted(_find(model_path, revision, cache).glob("*.safetensors")):
        with closing(SafetensorsFile(str(file), file.name)) as tensors:
            shapes |= {place.name: place.shape for place in tensors.places}
    return shapes


def _find(model_path: str, revision: str | None, cache: str | None) -> Path:
    path = Path(model_path)
    if path.is_dir():
        return path
    try:
        return Path(
            snapshot_download(model_path, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return path
