"""SGLang's runtime context with types. Each context belongs to a process."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt import runtime_context

from sglang_inflight.sglang_types.configuration import (
    Device,
    Disaggregation,
    Execution,
    Lora,
    Memory,
    Model,
    Observability,
    Parallel,
    Resources,
    RuntimeContext,
    Schedule,
    Serving,
)

get_context: Callable[[], RuntimeContext] = runtime_context.get_context
get_device: Callable[[], Device] = runtime_context.get_device
get_disagg: Callable[[], Disaggregation] = runtime_context.get_disagg
get_exec: Callable[[], Execution] = runtime_context.get_exec
get_lora: Callable[[], Lora] = runtime_context.get_lora
get_memory: Callable[[], Memory] = runtime_context.get_memory
get_model: Callable[[], Model] = runtime_context.get_model
get_observability: Callable[[], Observability] = runtime_context.get_observability
get_parallel: Callable[[], Parallel] = runtime_context.get_parallel
get_resources: Callable[[], Resources] = runtime_context.get_resources
get_schedule: Callable[[], Schedule] = runtime_context.get_schedule
get_serving: Callable[[], Serving] = runtime_context.get_serving
