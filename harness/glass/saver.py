"""The memory saver of the glass card, for ``--enable-memory-saver``, like torch_memory_saver.

A region's memory comes from a pool of its tag. A pause gives back the pages of the tag's pools, and
a resume takes them again at the same addresses, as zeros unless they were copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from sglang.srt.utils import torch_memory_saver_adapter as sglangs

# what a pause copies of a segment, or None
_Away = list[tuple[Any, "torch.Tensor | None"]]


class GlassSaver(sglangs.TorchMemorySaverAdapter):
    """SGLang makes several savers, and all of them have the process' regions."""

    _pools: ClassVar[dict[str, Any]] = {}
    # handles of pools by tag, and whether a pause copies them
    _handles: ClassVar[dict[str, dict[Any, bool]]] = {}
    _away: ClassVar[dict[str, _Away]] = {}

    @property
    def enabled(self) -> bool:
        return True

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        pool = self._pools.get(tag)
        if pool is None:
            pool = self._pools[tag] = _card().MemPool()
        self._handles.setdefault(tag, {})[pool.id] = enable_cpu_backup
        with _card().use_mem_pool(pool):
            yield

    @contextmanager
    def cuda_graph(  # type: ignore[override]
        self, *, tag: str, enable_cpu_backup: bool = False, pool: Any, **kwargs: Any
    ) -> Iterator[None]:
        self._handles.setdefault(tag, {})[pool] = enable_cpu_backup
        with _card().graph(pool=pool, **kwargs):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        with _card().use_mem_pool(_NoPool):
            yield

    def pause(self, tag: str) -> None:
        _card().synchronize()
        away = self._away[tag] = []
        for pool, is_copied in self._handles.get(tag, {}).items():
            for segment in _card().segments_of(pool):
                away.append((segment, segment.bytes_of().cpu() if is_copied else None))
                segment.discard()

    def resume(self, tag: str) -> None:
        for segment, copy in self._away.pop(tag):
            segment.restore()
            if copy is not None:
                segment.bytes_of().copy_(copy)


class _NoPool:
    """The memory that belongs to no pool."""

    id = (0, 0)


def install() -> None:
    """Make ``--enable-memory-saver`` use this saver."""
    adapter: Any = sglangs
    adapter._TorchMemorySaverAdapterReal = GlassSaver
    # SGLang would refuse the flag if torch_memory_saver is not installed
    adapter.import_error = None


def _card() -> Any:
    return torch.get_device_module("glass")
