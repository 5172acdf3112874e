"""The reference platform: the real SGLang server on a CPU, with torch kernels only.

SGLang's own CPU engine needs compiled kernels, missing from its wheel. This out-of-tree platform
(entry-point group ``sglang.srt.platforms``) asks for the ``torch_native`` attention backend and
for no compiled kernel. Scheduler, radix cache, tensor and data parallelism then run anywhere. The
platform is for development, tests and the demo, and yields to any accelerator.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_inflight_tools import cpu

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import ServerArgs

logger = logging.getLogger(__name__)

# name of our entry point
NAME = "inflight_reference"
DEVICES = Path("/dev")
THREADS = "OMP_NUM_THREADS"
# settings of how OpenMP threads wait for work; torch's wheels use GNU's OpenMP
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
# caches of oneDNN, and of torch's layer above it, with the kernels evicted by oneDNN
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# kernels per cache; enough for the recurring shapes of decode batches
KERNELS = 64


def activate() -> str | None:
    """Return the platform class' name, or None if an accelerator or the user's choice decides.

    ``SGLANG_USE_CPU_ENGINE=1`` chooses SGLang's own CPU engine. SGLang does not call this function
    if ``SGLANG_PLATFORM`` names another platform.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _has_accelerator():
        return None
    if (gpus := _unusable_gpus()) and envs.SGLANG_PLATFORM.get() != NAME:
        logger.critical(
            "%s is on this machine, and torch cannot use it (does nvidia-smi work? do torch and "
            "the driver fit?). Nothing is served on the CPU in its place. To serve on the CPU, set "
            "SGLANG_PLATFORM=%s, or set CUDA_VISIBLE_DEVICES to nothing.",
            gpus[0],
            NAME,
        )
        return None
    return f"{__name__}:ReferencePlatform"


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _unusable_gpus() -> list[Path]:
    """Return NVIDIA's devices, unless the user has hidden them. ``torch`` sees none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return sorted(DEVICES.glob("nvidia[0-9]*"))


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on ``torch.device("cpu")`` with torch's kernels and gloo's collectives."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> Any:
        # SGLang's CPU mixin returns a torch.device, but its argument resolution splits a string
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def for_actors(self) -> OnReferencePlatform:
        """Return what prepares the processes of schedulers on Ray when they unpickle it."""
        return OnReferencePlatform.of_this_process()

    def init_backend(self) -> None:
        """Prepare a process before it creates a model."""
        _save_pages()

    def post_load_model(self, model: torch.nn.Module) -> None:
        # imported late: the module imports SGLang modules that ask for the platform
        from sglang_inflight_tools.reference import (
            keep_host_memory_unpinned,
            send_without_events,
            serve_adapters_without_pinning,
        )

        serve_adapters_without_pinning()
        keep_host_memory_unpinned()
        send_without_events()

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Choose what the user left open: dtype, threads, idle loops, cores, kernel caches.

        Schedulers inherit this process' environment, and their OpenMP reads it when they import
        torch. The parent process computes nothing. By default SGLang gives each rank a NUMA node
        of its own, and stops if there are more ranks than nodes. ``"0|1"`` means rank 0 on core 0,
        rank 1 on core 1. By default torch caches 1024 kernels of up to 1 MiB, one for each shape
        of a matmul, and nearly every prefill has a new shape.
        """
        # here, too: the launcher starts processes through SGLang's memory saver
        _save_pages()
        for cache in KERNEL_CACHES:
            os.environ.setdefault(cache, str(KERNELS))
        config = _read_config(server_args)
        self._choose_dtype(server_args, config)
        self._let_idle_loops_sleep(server_args)
        replicas = 1 if _has_attention_dp(server_args) else server_args.dp_size
        ranks = server_args.tp_size * server_args.pp_size * replicas
        self._choose_threads(server_args, config, ranks)
        if ranks > 1 and THREADS_BIND not in os.environ:
            os.environ[THREADS_BIND] = _share_cores(ranks)

    def _choose_dtype(self, server_args: ServerArgs, config: Any) -> None:
        """Choose the dtype, except for quantized weights: their kernels need a certain one."""
        quantized = server_args.quantization or getattr(config, "quantization_config", None)
        if server_args.dtype == "auto" and not quantized:
            dtype, why = cpu.fast_dtype()
            server_args.dtype = dtype
            logger.info("The reference platform serves in %s: %s", dtype, why)

    def _let_idle_loops_sleep(self, server_args: ServerArgs) -> None:
        """Let idle schedulers sleep. Polling sockets takes a core from other processes.

        Not under attention DP: several ranks have a socket, a message wakes only one, and that
        rank would wait for the sleeping ones. Not under SGLang's scripted test runtime: its
        script steps with each pass of an idle loop.
        """
        if not (_has_attention_dp(server_args) or envs.SGLANG_TEST_SCRIPTED_RUNTIME.get()):
            server_args.sleep_on_idle = True

    def _choose_threads(self, server_args: ServerArgs, config: Any, ranks: int) -> None:
        """Let waiting threads sleep, and use no more threads than the matrices can feed.

        By default one thread spins on each core. Beside another busy process, spinning threads
        wait for a thread without a core, and steps take ten times as long.
        """
        if not any(name in os.environ for name in WAITING):
            os.environ["OMP_WAIT_POLICY"] = "passive"
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // ranks)
        weights = _largest_matrix(config)
        if weights is not None:
            threads = cpu.threads_for(weights // server_args.tp_size, threads)
        if os.environ.get(THREADS) == _own.get(THREADS):
            _own[THREADS] = os.environ[THREADS] = str(threads)
            logger.info("The reference platform computes with %s of %s cores", threads, cores)


@dataclass(frozen=True)
class OnReferencePlatform:
    """Prepares the process of a scheduler's Ray actor that unpickles it.

    A scheduler's process inherits the launching process' environment, and an actor does not.
    ``environment``: the launching process' variables for threads and kernels.
    """

    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> OnReferencePlatform:
        names = (*KERNEL_CACHES, *WAITING, THREADS, THREADS_BIND)
        return cls({name: os.environ[name] for name in names if name in os.environ})

    def __reduce__(self) -> tuple[Callable[..., OnReferencePlatform], tuple[dict[str, str]]]:
        return _prepare_actor, (dict(self.environment),)


def _prepare_actor(environment: dict[str, str]) -> OnReferencePlatform:
    """Share cores and threads like a scheduler's process, and let SGLang choose a GPU in vain."""
    import ray

    os.environ.update(environment)
    if (threads := environment.get(THREADS)) is not None:
        # OpenMP has read its environment before
        torch.set_num_threads(int(threads))
    # SGLang takes the share of this rank's GPU, by the number that Ray gave to it
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    shares = environment.get(THREADS_BIND, "").split("|")
    if gpus and int(gpus[0]) >= len(shares):
        os.environ[THREADS_BIND] = _share_cores(int(gpus[0]) + 1)
    torch.cuda.set_device = _keep_device
    return OnReferencePlatform(environment)


def _keep_device(device: object) -> None:
    """Stand in for ``torch.cuda.set_device``, which SGLang's actors call on every platform."""


def _save_pages() -> None:
    # imported late: the module imports SGLang modules that ask for the platform
    from sglang_inflight_tools.reference import save_pages

    save_pages()


def describe_threads() -> str:
    """Describe the choice of ``_choose_threads`` in this environment."""
    waiting = next((name for name in WAITING if name in os.environ), None)
    wait = f"wait as {waiting}={os.environ[waiting]} says" if waiting else "sleep while they wait"
    if THREADS in os.environ and THREADS not in _own:
        return f"{os.environ[THREADS]}, as {THREADS} says; they {wait}"
    return (
        "one for each million weights of a layer's largest matrix, at most "
        f"{len(os.sched_getaffinity(0))}, shared by the ranks; they {wait}"
    )


# variables set here, not by the user: another Engine of this process may need other values
_own: dict[str, str] = {}


def _has_attention_dp(server_args: ServerArgs) -> bool:
    """Return whether attention DP is on, by SGLang's older flag (width: ``dp_size``) or newer."""
    return server_args.enable_dp_attention or server_args.attn_dp_size > 1


def _read_config(server_args: ServerArgs) -> Any:
    """Return the language model's configuration, or None if it cannot be read."""
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    try:
        config = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
        # a copy: SGLang caches the configuration
        return get_hf_text_config(copy.deepcopy(config))
    except Exception:
        # SGLang reads it next, and reports the error
        return None


def _largest_matrix(config: Any) -> int | None:
    """Return the number of weights of a layer's largest matrix, or None if it is unknown."""
    sizes = [getattr(config, name, None) for name in ("hidden_size", "intermediate_size")]
    hidden, intermediate = (size if isinstance(size, int) else None for size in sizes)
    return None if hidden is None or intermediate is None else hidden * intermediate


def _share_cores(ranks: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    return "|".join(
        ",".join(str(cores[(rank * share + i) % len(cores)]) for i in range(share))
        for rank in range(ranks)
    )
