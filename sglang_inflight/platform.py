"""The reference platform: the real SGLang server on a CPU, with torch kernels only.

SGLang's own CPU engine needs compiled kernels that its wheel does not carry. This
out-of-tree platform (entry-point group ``sglang.srt.platforms``) asks for the
``torch_native`` attention backend and for no compiled kernel, so that scheduler, radix
cache, tensor and data parallelism run anywhere. It is for development, tests and the
demo, and it steps aside wherever something better is there.
"""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_inflight import cpu
from sglang_inflight.reference.lora import serve_adapters_without_pinning
from sglang_inflight.sglang_types.server_args import ServerArgs

logger = logging.getLogger(__name__)

# of our entry point
NAME = "inflight_reference"
DEVICES = Path("/dev")
THREADS = "OMP_NUM_THREADS"
# how threads wait for the next matrix; those of torch's wheels are GNU's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
# oneDNN's, and that of torch's layer above it, which keeps what oneDNN's lets go
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# enough for decode batches, which come again and again
KERNELS = 64


def activate() -> str | None:
    """Name the platform class, or None where an accelerator or a user's choice decides.

    ``SGLANG_USE_CPU_ENGINE=1`` is the user's choice of SGLang's own CPU engine. SGLang activates
    only the platform that ``SGLANG_PLATFORM`` names, so where it names another one this is not
    called.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _has_accelerator():
        return None
    if (gpus := _unusable_gpus()) and envs.SGLANG_PLATFORM.get() != NAME:
        logger.critical(
            "%s is on this machine, and torch cannot use it (does nvidia-smi work? do torch and "
            "the driver fit?). Nothing is served on the CPU in its place: set SGLANG_PLATFORM=%s, "
            "or CUDA_VISIBLE_DEVICES to nothing, where that is wanted.",
            gpus[0],
            NAME,
        )
        return None
    return f"{__name__}:ReferencePlatform"


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _unusable_gpus() -> list[Path]:
    """NVIDIA's devices, unless the user has hidden them. ``torch`` sees none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return sorted(DEVICES.glob("nvidia[0-9]*"))


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on ``torch.device("cpu")`` with torch's kernels and gloo's collectives."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        # upstream's CPU mixin gives a torch.device, its argument resolution splits a string
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Called in each process that runs a model, before it makes one."""
        _save_pages()

    def post_load_model(self, model: torch.nn.Module) -> None:
        # it imports what asks for the platform
        from sglang_inflight.reference.host_tier import keep_a_host_tier
        from sglang_inflight.reference.transfer import send_without_events

        serve_adapters_without_pinning()
        keep_a_host_tier()
        send_without_events()

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """What the user left open: dtype, threads, idle loops, cores of ranks, kernels' memory.

        The environment is what schedulers are started with: each is a new process, whose
        OpenMP reads it when torch is imported, and the process that comes here computes
        nothing itself. SGLang otherwise gives each rank a NUMA node of its own, and stops
        where there are more ranks than nodes. ``"0|1"`` means rank 0 on core 0, rank 1 on
        core 1. A kernel of up to a MiB is kept for each shape of a matmul, by default 1024
        of them, and nearly every prefill has a shape of its own.
        """
        # here, too: processes are started by way of a memory saver
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
        """Quantized weights come with a dtype that their kernels want."""
        quantized = server_args.quantization or getattr(config, "quantization_config", None)
        if server_args.dtype == "auto" and not quantized:
            dtype, why = cpu.fast_dtype()
            server_args.dtype = dtype
            logger.info("The reference platform serves in %s: %s", dtype, why)

    def _let_idle_loops_sleep(self, server_args: ServerArgs) -> None:
        """An idle scheduler polls its sockets without a rest: here it is the core of another.

        Under attention DP several ranks have a socket, and a message wakes one of them alone:
        it would wait for those that sleep. A script of SGLang's own tests steps with each pass
        of an idle loop.
        """
        if not (_has_attention_dp(server_args) or envs.SGLANG_TEST_SCRIPTED_RUNTIME.get()):
            server_args.sleep_on_idle = True

    def _choose_threads(self, server_args: ServerArgs, config: Any, ranks: int) -> None:
        """Threads that sleep while they wait, and no more of them than the matrices feed.

        By default they spin, one on each core, so that beside any other busy process the one
        that all wait for is the one that has no core: steps then take ten times as long.
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


def _save_pages() -> None:
    # it imports what asks for the platform
    from sglang_inflight.reference.memory import save_pages

    save_pages()


def describe_threads() -> str:
    """What ``_choose_threads`` does in this environment."""
    waiting = next((name for name in WAITING if name in os.environ), None)
    wait = f"wait as {waiting}={os.environ[waiting]} says" if waiting else "sleep while they wait"
    if THREADS in os.environ and THREADS not in _own:
        return f"{os.environ[THREADS]}, as {THREADS} says; they {wait}"
    return (
        "one for each million weights of a layer's largest matrix, at most "
        f"{len(os.sched_getaffinity(0))}, shared by the ranks; they {wait}"
    )


# what was set here and not by the user: another Engine of this process may need another
_own: dict[str, str] = {}


def _has_attention_dp(server_args: ServerArgs) -> bool:
    """In either of the two ways to ask for it; ``dp_size`` is its width in the older one."""
    return server_args.enable_dp_attention or server_args.attn_dp_size > 1


def _read_config(server_args: ServerArgs) -> Any:
    """The language model's configuration, or None where it cannot be read."""
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    try:
        config = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
        # SGLang keeps what it read, and changes copies of it only
        return get_hf_text_config(copy.deepcopy(config))
    except Exception:
        # SGLang reads it next, and says what is wrong with it
        return None


def _largest_matrix(config: Any) -> int | None:
    """The weights of a layer's largest matrix, or None where the model does not tell."""
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
