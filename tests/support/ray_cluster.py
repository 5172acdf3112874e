"""A Ray cluster of several nodes on this machine, and servers whose schedulers are its actors."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from harness.server import IN_A_FORK, Server, serve
from harness.starting import ROOT

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# a machine without GPUs hands out their names
_GPUS_A_NODE = 2
# Ray's least, because schedulers send nothing through it
_STORE_BYTES = 80 << 20

# marks of a file: its tests share a cluster, and each actor imports SGLang anew
ON_RAY = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: make test-ray installs it"
    ),
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("on_ray"),
]


class RayCluster:
    """Nodes of one Ray, with the names of two GPUs each. The driver's node is the first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a driver."""
        return {"RAY_ADDRESS": self._cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}

    def add_node(self, env: Mapping[str, str] | None = None, *, gpus: int = _GPUS_A_NODE) -> Any:
        """Add a node whose actors have ``env`` in their environment, too."""
        return self._cluster.add_node(
            **_node(gpus), env_vars={"PYTHONPATH": _path(), **(env or {})}
        )

    def remove_node(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def actors(self) -> list[psutil.Process]:
        """Return the processes of all living schedulers."""
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if "SchedulerActor" in " ".join(_command(process))
        ]


@contextlib.contextmanager
def ray_cluster(
    env: Mapping[str, str] | None = None, *, gpus: int = _GPUS_A_NODE
) -> Iterator[RayCluster]:
    """Start a cluster of one node. ``env`` is added to the environment of its actors."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    # Ray writes the cluster's address there, and makes no folder for it
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    # the names of Ray's sockets are limited to 107 bytes, and a test's folder is too deep
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = Cluster()
    try:
        cluster.add_node(
            **_node(gpus),
            include_dashboard=False,
            temp_dir=str(folder),
            # Ray would kill actors when other processes fill the machine's memory
            _system_config={"memory_monitor_refresh_ms": 0},
            env_vars={"PYTHONPATH": _path(), **(env or {})},
        )
        yield RayCluster(cluster)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serve_on_ray(
    cluster: RayCluster,
    model: Path,
    *flags: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Server]:
    """Start a server with ``--use-ray``, which serves v0."""
    command = (*IN_A_FORK, "--use-ray")
    flags = ("--weight-version", "v0", *flags)
    env = {**cluster.environment, **(env or {})}
    with serve(model, *flags, log=log, env=env, command=command, cwd=cwd) as server:
        yield server


def _node(gpus: int) -> dict[str, Any]:
    return {"num_cpus": 4, "num_gpus": gpus, "object_store_memory": _STORE_BYTES}


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
