"""Hooks on SGLang's launchers of schedulers in Ray's actors.

They are installed when SGLang imports these launchers, because the import needs Ray. A doctor
lists the hooks without Ray, so Ray is imported late here.

**Plugins.** SGLang's own launchers, for one replica and for several, create each actor by one
function. The hook there gives the actor an ``Installation`` (``actors.py``).

**GPUs.** SGLang asks Ray for one GPU for each rank, and waits until there are as many. A rank on a
CPU needs none, and one hook asks for none.

**Several replicas.** SGLang 0.5.23 cannot start them on Ray; one hook mends that.

**An actor's death.** SGLang's watchdog ends a server whose scheduler process has died, and does not
watch actors. The hooks let it watch them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms import current_platform

from sglang_inflight.extensions.nodes.check import describe_this_node
from sglang_inflight.extensions.ray.actors import Installation, own_node
from sglang_inflight.hooking import AFTER, AROUND, BEFORE, RAY_ENGINE, hook
from sglang_inflight.inactive import why_inactive
from sglang_inflight.settings import PREFIX

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import SchedulerInitResult
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.sglang_types import ServerArgs

logger = logging.getLogger(__name__)

# attributes of an actor's ``PortArgs``
_PLUGIN, _PLATFORM = "inflight_installation", "inflight_platform"


@hook(f"{RAY_ENGINE}._create_scheduler_actor", AROUND)
def create_with_us(
    create: Callable[..., Any],
    pg: Any,
    bundle_idx: int,
    gpu_id: int,
    server_args: ServerArgs,
    port_args: PortArgs,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give a new actor an ``Installation``, unless the server runs without us."""
    # a copy: other processes of this server unpickle the original
    port_args = copy.copy(port_args)
    # the reference platform shares out cores by the environment, which an actor does not inherit
    for_actors = getattr(current_platform, "for_actors", None)
    if for_actors is not None:
        setattr(port_args, _PLATFORM, for_actors())
    if why_inactive() is None:
        setattr(port_args, _PLUGIN, _describe(pg))
    return create(pg, bundle_idx, gpu_id, server_args, port_args, *args, **kwargs)


def _describe(group: Any) -> Installation:
    from ray.util import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"].values()
    settings = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    return Installation(settings, describe_this_node(), own_node(), len({*nodes}) > 1)


class _WithoutGPUs:
    """SGLang's class of actors, whose actors ask Ray for no GPU."""

    def __init__(self, actors: Any) -> None:
        self._actors = actors

    def options(self, **options: Any) -> Any:
        return self._actors.options(**{**options, "num_gpus": 0})


@hook(f"{RAY_ENGINE}.RayEngine._launch_scheduler_processes", AROUND, order=1)
def launch_without_gpus(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask Ray for no GPU on a CPU. SGLang would wait for one for each rank, for ever."""
    if current_platform.device_type != "cpu" or why_inactive() is not None:
        return launch(*args, **kwargs)
    with asking_for_no_gpus():
        return launch(*args, **kwargs)


@contextlib.contextmanager
def asking_for_no_gpus() -> Iterator[None]:
    """Let the placement groups and the schedulers of this thread ask Ray for no GPU.

    SGLang writes its wishes into the middle of a long function, so what it calls there is replaced.
    """
    engine: Any = importlib.import_module(RAY_ENGINE)
    groups: Any = importlib.import_module("ray.util.placement_group")
    actors, place = engine.SchedulerActor, groups.placement_group
    launching = threading.get_ident()

    def place_without_gpus(bundles: Sequence[dict[str, float]], *args: Any, **kwargs: Any) -> Any:
        # other threads of a driver may make groups of their own meanwhile
        if threading.get_ident() == launching:
            bundles = [
                {name: count for name, count in bundle.items() if name != "GPU"}
                for bundle in bundles
            ]
        return place(bundles, *args, **kwargs)

    engine.SchedulerActor = _WithoutGPUs(actors)
    groups.placement_group = place_without_gpus
    try:
        yield
    finally:
        engine.SchedulerActor, groups.placement_group = actors, place


class WatchedActor:
    """A scheduler's actor, as SGLang's watchdog sees a process."""

    def __init__(self, loop: Any, actor: Any) -> None:
        """``loop`` is Ray's reference to the end of the actor's event loop."""
        self._loop = loop
        self.pid = f"Ray's actor {actor._actor_id.hex()}"
        # 0 after a shutdown, 1 if the actor's process or its event loop has failed
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        import ray

        ended, _ = ray.wait([self._loop], timeout=0)
        if ended and self.exitcode is None:
            try:
                ray.get(self._loop)
                self.exitcode = 0
            except ray.exceptions.RayError as error:
                logger.error("%s has failed: %s", self.pid, error)
                self.exitcode = 1
        return not ended


@hook(f"{RAY_ENGINE}.RayEngine._launch_scheduler_processes", AFTER)
def watch_actors(
    launched: tuple[SchedulerInitResult, None], *args: Any, **kwargs: Any
) -> tuple[SchedulerInitResult, list[WatchedActor]] | None:
    """Give SGLang's watchdog the actors as the server's scheduler processes."""
    if why_inactive() is not None:
        return None
    result, _ = launched
    # SGLang keeps the references only there
    waits = inspect.getclosurevars(result.block_until_scheduler_exits).nonlocals
    loops = waits["event_loop_refs"]
    actors: list[Any] = vars(result)["scheduler_actors"]
    return result, [WatchedActor(*each) for each in zip(loops, actors, strict=True)]


@hook(f"{RAY_ENGINE}.RayEngine.shutdown", BEFORE)
def stop_watching(engine: Any) -> None:
    """Stop SGLang's watchdog before SGLang kills the actors: their deaths are meant."""
    manager = engine.tokenizer_manager
    if manager is not None and manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()


@hook("sglang.srt.arg_groups.overrides.declare_resolution", AROUND)
def leave_published_arguments(
    declare: Callable[..., None], server_args: ServerArgs, source: str, **fields: Any
) -> None:
    """Mend SGLang's start of several replicas on Ray.

    SGLang sets the rendezvous address on frozen arguments, and its own check rejects that. The
    address has no reader in the driver. Each actor gets it as an argument, and declares it on
    arguments of its own.
    """
    if source != "ray.dp_controller" or why_inactive() is not None:
        declare(server_args, source, **fields)
