"""A CPU as verl's device, by verl's own interface for platforms.

``VERL_USE_EXTERNAL_MODULES`` names this module, ``VERL_PLATFORM`` is "cpu", and
``VERL_ENGINE_DEVICE`` is "cuda": verl registers its FSDP engine for that name, and the engine
itself asks the platform for a device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.platforms import current_platform
from sglang.srt.utils import is_cpu
from torch.multiprocessing import reductions, set_sharing_strategy
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    return None


class _Module(ModuleType):
    """``torch.cpu``, with the functions of ``torch.cuda`` that verl calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


MODULE = _Module("torch.cpu for verl")
MODULE.__dict__.update(
    is_available=lambda: False,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    set_device=_nothing,
    synchronize=_nothing,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (0, 0),
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=0),
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Ray hands out "GPU" names, of which a machine without GPUs may declare any number."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


# verl asks for SGLang's own engine for CPUs while it imports SGLang. That engine needs a driver's
# library. SGLang chooses once, so it chooses before.
assert current_platform.device_name == "cpu"
assert not is_cpu()

# verl's default names a backend for the CPU and one for the device, which torch refuses if both
# are the same
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)

# SGLang's replacement for this function puts a GPU's name into each handle to a tensor; it leaves
# torch's own function where it finds itself here already
vars(reductions)["_reduce_tensor_original"] = reductions.reduce_tensor
# Ray's workers and the server's are no relatives, between which torch can pass descriptors
set_sharing_strategy("file_system")
