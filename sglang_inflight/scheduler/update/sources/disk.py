"""Reads the tensors of a checkpoint in a directory, or by a name on the Hub.

No change to the directory can stop or end the server. Files are read and not mapped
(``RegularFile``), and all tensors are of one checkpoint (``checkpoint_files``). An
``AbandonableThread`` makes all accesses to the directory: its mount may stall.
"""

from __future__ import annotations

import copy
import json
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import (
    _prefetch_all_checkpoints,
    maybe_add_mtp_safetensors,
)

from sglang_inflight.messages import SPARSE, DiskSource
from sglang_inflight.scheduler.update.checks.configuration import (
    CONFIG,
    GENERATION_CONFIG,
    StartConfiguration,
)
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_pickled, read_safetensors
from sglang_inflight.scheduler.update.sources.regular_file import read_whole
from sglang_inflight.scheduler.update.sources.safetensors_file import EVERYTHING, Indexes, Wanted
from sglang_inflight.scheduler.update.sources.stretch import Take, take_none
from sglang_inflight.sglang_types import get_model
from sglang_inflight.vocabulary.errors import Refused, describe, shorten

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

S = TypeVar("S", bound=msgspec.Struct)

# Formats of SGLang's default loader. Other formats load by other means: they write the live model,
# fetch from elsewhere, or make weights up.
LOAD_FORMATS = (
    LoadFormat.AUTO,
    LoadFormat.SAFETENSORS,
    LoadFormat.PT,
    LoadFormat.MISTRAL,
    # names of libraries for safetensors; here our own reader reads the files
    LoadFormat.FASTSAFETENSORS,
    LoadFormat.INSTANTTENSOR,
)

# Limits of JSON files, whose decoding holds the interpreter. The index of a checkpoint with 90,000
# tensors has 9 MB.
_MOST_CONFIG_BYTES = 4 << 20
_MOST_INDEX_BYTES = 64 << 20
_INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")


def read_disk(
    source: DiskSource,
    runner: ModelRunner,
    *,
    refuse_another: Callable[[Folder], None],
    check: Callable[[], None],
    rate_limit: RateLimit,
    wants: Wanted = EVERYTHING,
    take: Take = take_none,
    indexes: Indexes | None = None,
) -> Weights:
    """Yield a checkpoint's tensors, on the host, file by file.

    ``wants`` says whether a tensor need be read. Others may come without memory. ``take`` and
    ``indexes``: see ``read_safetensors``.

    ``refuse_another`` gets the folder before its files are chosen, and raises ``Refused`` for
    another model's (``check_configuration``). ``check`` raises when it is time to give up.
    """
    load_format = _known(source.load_format)
    with AbandonableThread(check) as thread, ExitStack() as stack:
        folder = thread.do(lambda: _open(source.model_path, runner, load_format))
        stack.callback(folder.close)
        with naming(folder):
            thread.do(lambda: refuse_another(folder))
            paths, is_safetensors = thread.do(lambda: _select(folder, runner, load_format))
            read: Callable[..., Weights] = read_pickled
            if is_safetensors:
                read = partial(read_safetensors, wants=wants, take=take, indexes=indexes)
            forgets = get_model().weight_loader_drop_cache_after_load
            with _prefetched(paths, is_safetensors):
                yield from read(paths, thread, rate_limit, forgets_pages=forgets)


def _known(load_format: str | None) -> LoadFormat:
    if load_format is None:
        return LoadFormat.AUTO
    for known in LOAD_FORMATS:
        if load_format.lower() == known.value:
            return known
    raise Refused(
        f"load_format {shorten(load_format)!r} is not known for updates from disk; there are "
        + ", ".join([*(known.value for known in LOAD_FORMATS), SPARSE])
    )


def _open(model_path: str, runner: ModelRunner, load_format: LoadFormat) -> Folder:
    return Folder(_fetch(model_path, runner, load_format), named=model_path)


def _fetch(model_path: str, runner: ModelRunner, load_format: LoadFormat) -> str:
    """Return the directory of ``model_path``: itself, or SGLang's copy of a name on the Hub.

    SGLang fetches missing files, without a time limit.
    """
    if os.path.isdir(model_path):
        return model_path
    try:
        validate_repo_id(model_path)
    except HFValidationError:
        # not a name either: opening it refuses it as no directory
        return model_path
    try:
        folder, _, _ = _prepare(_at(model_path, runner), runner, load_format)
    except Exception as error:
        raise Refused(
            f"model_path {shorten(model_path)!r} is not a directory on the server, and cannot be "
            f"fetched from the Hub by this name: {shorten(describe(error))}"
        ) from error
    return folder


class Folder:
    """A directory held open: a later directory of the same name is not read."""

    def __init__(self, path: str, named: str) -> None:
        """``named`` is the caller's name for the directory."""
        self.named = repr(shorten(named))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(path, flags)
        except (OSError, ValueError) as error:
            raise Refused(
                f"model_path {self.named} is not a directory on the server: {describe(error)}"
            ) from error
        # the finalizer closes if the caller gave up before the opening returned
        self.close = weakref.finalize(self, os.close, fd)
        # a path without characters of a glob pattern
        self.path = f"/proc/self/fd/{fd}"

    def check_size(self, name: str, most: int) -> None:
        """Raise ``Refused`` if the file exists and is too large to decode."""
        try:
            found = os.stat(os.path.join(self.path, name))
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{name} is no regular file")
        if found.st_size > most:
            raise Refused(f"{name} has {found.st_size} bytes, at most {most} are allowed")

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file's content of at most ``most`` bytes, or None if it is not there."""
        return read_whole(os.path.join(self.path, name), name, most)

    def read_json(self, name: str, shape: type[S], most: int) -> S:
        """Return a JSON file of at most ``most`` bytes. Raise ``Refused`` if it is not there."""
        content = self.read(name, most)
        if content is None:
            raise Refused(f"it has no {name}")
        try:
            return msgspec.json.decode(content, type=shape)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(f"{name} cannot be read: {shorten(str(error))}") from error


@contextmanager
def naming(folder: Folder) -> Iterator[None]:
    """Name the checkpoint in every failure, by the caller's name for it."""
    try:
        yield
    except Refused as error:
        raise type(error)(f"checkpoint {folder.named}: {error}") from error
    except Exception as error:
        reason = describe(error).replace(f"{folder.path}/", "").replace(folder.path, folder.named)
        raise Refused(f"checkpoint {folder.named} cannot be read: {reason}") from error


def check_configuration(
    folder: Folder,
    runner: ModelRunner,
    start: StartConfiguration | None,
    warn: Callable[[str], None],
) -> None:
    """Raise ``Refused`` if the folder's ``config.json`` is of another model, or computes otherwise.

    ``start`` is None if the start's file is not known. A folder without the file passes. ``warn``
    gets what the update does not take over.
    """
    config = _read_object(folder, CONFIG)
    if config is None:
        return
    _check_architecture(config, runner)
    if start is None:
        return
    start.refuse_another(config)
    generation = _read_object(folder, GENERATION_CONFIG) or {}
    if (warning := start.why_it_ends_elsewhere(config, generation)) is not None:
        warn(warning)


def _read_object(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return a JSON file's content, or None without the file."""
    content = folder.read(name, _MOST_CONFIG_BYTES)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} cannot be read: {shorten(str(error))}") from error
    if not isinstance(found, dict):
        raise Refused(f"{name} must hold an object, not a {type(found).__name__}")
    return found


def _check_architecture(config: Mapping[str, Any], runner: ModelRunner) -> None:
    found = config.get("architectures")
    own = runner.model_config.hf_config.architectures
    if not found or not own:
        return
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise Refused(
            f"architectures in {CONFIG} must be a list of names, not {shorten(repr(found))}"
        )
    if found != own:
        raise Refused(f"it is a {shorten(', '.join(found))}; this server serves a {', '.join(own)}")


def _select(folder: Folder, runner: ModelRunner, load_format: LoadFormat) -> tuple[list[str], bool]:
    """Return SGLang's choice of files, and whether they are safetensors."""
    for index in _INDEXES:
        folder.check_size(index, _MOST_INDEX_BYTES)
    config = _at(folder.path, runner)
    path, files, is_safetensors = _prepare(config, runner, load_format)
    if is_safetensors:
        files = maybe_add_mtp_safetensors(files, path, _INDEXES[0], config.hf_config)
    return files, is_safetensors


def _at(model_path: str, runner: ModelRunner) -> ModelConfig:
    config = copy.copy(runner.model_config)
    config.model_path = model_path
    return config


def _prepare(
    config: ModelConfig, runner: ModelRunner, load_format: LoadFormat
) -> tuple[str, list[str], bool]:
    """Return the directory, SGLang's choice of its files, and whether they are safetensors."""
    cache = runner.load_config.download_dir
    loader = DefaultModelLoader(LoadConfig(load_format=load_format, download_dir=cache))
    source = DefaultModelLoader.Source.init_new(config, runner.model)
    found: tuple[str, list[str], bool] = loader._prepare_weights(
        source.model_or_path,
        source.revision,
        source.fall_back_to_pt,
        source.allow_patterns_overrides,
    )
    return found


@contextmanager
def _prefetched(paths: list[str], is_safetensors: bool) -> Iterator[None]:
    """Prefetch as SGLang does: the ranks of a node share the reading from a slow mount."""
    if not is_safetensors or not get_model().weight_loader_prefetch_checkpoints:
        yield
        return
    threads = get_model().weight_loader_prefetch_num_threads
    prefetching = _prefetch_all_checkpoints(sorted(paths), num_threads=threads)
    try:
        yield
    finally:
        prefetching.stop()
