"""``torch.glass``: streams, events, memory and graphs, by the names of ``torch.cuda``."""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

NAME = "glass"
_BUILT = Path(__file__).parents[2] / "build" / "glass" / "_glass.so"

_core: Any = None


def register() -> None:
    """Make the device known to torch. Called by torch itself, through its entry point."""
    global _core
    if _core is not None:
        return
    loader = importlib.machinery.ExtensionFileLoader("_glass", str(_BUILT))
    spec = importlib.util.spec_from_loader("_glass", loader)
    assert spec is not None
    _core = importlib.util.module_from_spec(spec)
    loader.exec_module(_core)
    rename_privateuse1_backend(NAME)
    _core.register_device()
    torch._register_device_module(NAME, sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    atexit.register(_core.stop)
    from harness.glass import communicator

    communicator.register()


def _index(device: Any = None) -> int:
    if device is None:
        return int(_core.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_core.current_device()) if index is None else index


def _device(device: Any = None) -> torch.device:
    return torch.device(NAME, _index(device))


# ---- devices -------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_core.is_initialized())


def init() -> None:
    """Do nothing: the device sets itself up at its first use."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_core.device_count())


def current_device() -> int:
    return int(_core.current_device())


def set_device(device: Any) -> None:
    _core.set_device(_index(device))


class device:
    """The current device inside of the block."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def device_of(tensor: torch.Tensor) -> device:
    return device(tensor.device)


def get_device_name(device: Any = None) -> str:
    return "glass card"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    return SimpleNamespace(
        name=get_device_name(),
        major=9,
        minor=0,
        total_memory=mem_get_info(index)[1],
        multi_processor_count=1,
        uuid=f"glass-{os.uname().nodename}-{index}",
    )


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- streams and events -----------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of the device's pool. ``priority``: negative is high."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The stream's handle, unlike any other's of this device."""
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """A point of a stream. Times are the host's clock."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return super().__new__(cls, _device(), enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end: Any) -> float:
        # torch's own refuses subclasses
        return float(_core.elapsed_ms(self.event_id, end.event_id))


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def current_stream(device: Any = None) -> Stream:
    return _as_stream(torch.accelerator.current_stream(_index(device)))


def default_stream(device: Any = None) -> Stream:
    # a stream of the pool is another for each that is drawn, so none is drawn for its type
    kind = torch.accelerator.current_stream(_index(device)).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: Any) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """The current stream, and its device, inside of the block."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device_before = current_device()
        set_device(self.stream.device_index)
        self._before = current_stream()
        set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is None:
            return
        set_stream(self._before)
        set_device(self._device_before)


def stream(stream: Any) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: Any = None) -> None:
    # torch's own does nothing where only memory of another process was used
    _core.synchronize_device(_index(device))


def hold(stream: Any = None) -> Callable[[], None]:
    """Stop ``stream`` behind what it has by now; return the function that lets it go on."""
    stream = current_stream() if stream is None else stream
    release: Callable[[], None] = _core.hold(stream.stream_id, stream.device_index)
    return release


def reseed(seed: int) -> None:
    """Draw the delays, or the order of work, anew as if the process had begun with ``seed``."""
    _core.reseed(seed)


def waiting() -> list[str]:
    """Return a line for each stream with work left, and what its next work waits for."""
    return list(_core.waiting())


def races() -> list[str]:
    """Return the races that were found, also those that nobody raised (``GLASS_RACES=note``)."""
    return list(_core.races())


def clear_races() -> None:
    _core.clear_races()


def error() -> str:
    """Return the error by which the device is lost, or an empty string."""
    return str(_core.error())


# ---- memory --------------------------------------------------------------------------------


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and all bytes of the device."""
    free, total = _core.mem_get_info(_index(device))
    return free, total


def memory_stats(device: Any = None) -> dict[str, int]:
    return dict(_core.statistics(_index(device)))


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _core.reset_peak(_index(device))


def empty_cache() -> None:
    if is_initialized():
        _core.empty_cache()


def empty_pinned_cache() -> int:
    """Give free pinned blocks back to the kernel, and return their bytes."""
    return int(_core.empty_pinned_cache())


def pinned_bytes() -> tuple[int, int]:
    """Return the bytes of used and of free pinned blocks."""
    used, free = _core.pinned_bytes()
    return used, free


def ipc_collect() -> None:
    """Do nothing: memory opened from another process is closed with its last tensor."""


def discard(storage: torch.UntypedStorage) -> None:
    """Give the pages inside of a storage back, and keep their addresses."""
    _core.send_away(*_pages(storage))


def restore(storage: torch.UntypedStorage) -> None:
    """Take pages given back by ``discard`` again; they hold zeros."""
    _core.bring_back(*_pages(storage))


def _pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    page = 4096
    begin = -(-storage.data_ptr() // page) * page
    end = (storage.data_ptr() + storage.nbytes()) // page * page
    return begin, max(0, end - begin)


class Segment:
    """A range of the device's memory that a pool has taken, with everything in it."""

    def __init__(self, begin: int, size: int) -> None:
        self._range = begin, size

    def bytes_of(self) -> torch.Tensor:
        """Return the segment's bytes as a tensor, which does not keep the memory."""
        made: torch.Tensor = _core.storage_at(*self._range, current_device(), self)
        return made

    def discard(self) -> None:
        """Give the pages back, and keep their addresses."""
        _core.send_away(*self._range)

    def restore(self) -> None:
        """Take the pages again; they hold zeros."""
        _core.bring_back(*self._range)


def segments_of(pool: Any) -> list[Segment]:
    """Return the segments of a pool, by its handle."""
    return [Segment(begin, size) for begin, size in _core.segments_of(pool)]


def describe(address: int) -> str:
    """Say which block an address is in."""
    return str(_core.describe(address))


class _Opened:
    """Another process' memory, mapped here; closed with its last tensor."""

    def __init__(self, process: int, fd: int, size: int, device: int) -> None:
        self.begin: int = _core.open_shared(process, fd, size, device)

    def __del__(self) -> None:
        _core.close_shared(self.begin)


def share(tensor: torch.Tensor) -> dict[str, int]:
    """Return a handle to a tensor's storage, for ``open_shared`` in another process.

    The memory is this process': it must outlive the other's use, and its work must be over before.
    """
    storage = tensor.untyped_storage()
    fd, offset = _core.share(storage.data_ptr())
    return {
        "process": os.getpid(),
        "fd": fd,
        "offset": offset,
        "bytes": storage.nbytes(),
        "memory": mem_get_info(tensor.device)[1],
        "device": _index(tensor.device),
    }


def open_shared(handle: dict[str, int]) -> torch.Tensor:
    """Return the bytes of another process' storage, as a tensor."""
    opened = _Opened(handle["process"], handle["fd"], handle["memory"], handle["device"])
    begin = opened.begin + handle["offset"]
    made: torch.Tensor = _core.storage_at(begin, handle["bytes"], handle["device"], opened)
    return made


# ---- random numbers ------------------------------------------------------------------------


def _generator(device: Any = None) -> torch.Generator:
    return default_generators()[_index(device)]


def default_generators() -> list[torch.Generator]:
    return [_default_generator(index) for index in range(device_count())]


_generators: dict[int, torch.Generator] = {}


def _default_generator(index: int) -> torch.Generator:
    if index not in _generators:
        _generators[index] = _core.default_generator(index)
    return _generators[index]


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators():
        generator.manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


# ---- graphs --------------------------------------------------------------------------------


class Graph:
    """Captured launches, replayed with the addresses that they had; ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = _core.Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._graph.capture_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        self._graph.capture_end()

    def instantiate(self) -> None:
        """Do nothing: captured launches need no preparation."""

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        first, second = self._graph.pool()
        return first, second


CUDAGraph = Graph


def graph_pool_handle() -> tuple[int, int]:
    first, second = _core.new_pool()
    return first, second


def is_current_stream_capturing() -> bool:
    return bool(_core.is_capturing())


class graph:
    """Captures the block's launches into ``cuda_graph``, on a stream of its own."""

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        cuda_graph: Graph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        if stream is None:
            if graph.default_capture_stream is None:
                graph.default_capture_stream = Stream()
            stream = graph.default_capture_stream
        self.capture_stream = stream
        self.cuda_graph = cuda_graph
        self._pool = pool
        self._mode = capture_error_mode
        self._context = StreamContext(stream)

    def __enter__(self) -> None:
        synchronize()
        empty_cache()
        self._context.__enter__()
        self.cuda_graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: object) -> None:
        try:
            self.cuda_graph.capture_end()
        finally:
            self._context.__exit__(*error)


class MemPool:
    """A pool of memory of its own; used by ``use_mem_pool``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.id = graph_pool_handle()
        _core.keep_pool(self.id)

    def __del__(self) -> None:
        _core.drop_pool(self.id)


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Allocate this thread's device memory from ``pool`` inside of the block."""
    before = _core.exchange_thread_pool(pool.id)
    try:
        yield
    finally:
        _core.exchange_thread_pool(before)


def launch_exchange(table: torch.Tensor, width: int) -> None:
    """Exchange the elements that the rows of ``table`` name, in one launch over addresses.

    ``table``: int64 of shape (n, 4), on the device: the addresses of a range of weights, of new
    values, of their places (uint16; 0: all in order), and their count. ``width``: bytes of an
    element. An address that is not a used block's or pinned memory's loses the device.
    """
    _core.launch_exchange(table, width)


amp = types.SimpleNamespace()
