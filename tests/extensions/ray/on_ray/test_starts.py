"""An actor that cannot run with us ends the start with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import marker
from harness.starting import ROOT
from tests.support.load import Generation, status
from tests.support.pool import ServerPool
from tests.support.ray_cluster import ON_RAY, RayCluster, ray_cluster, serve_on_ray
from tests.support.updates import expect_served

pytestmark = ON_RAY


def with_other_code(folder: Path) -> dict[str, str]:
    shutil.copytree(ROOT / "sglang_inflight", folder / "sglang_inflight")
    shutil.copytree(ROOT / "patches", folder / "patches")
    with (folder / "sglang_inflight" / "messages.py").open("a") as changed:
        changed.write("# another version\n")
    return {"PYTHONPATH": str(folder)}


def without_package(folder: Path) -> dict[str, str]:
    package = folder / "sglang_inflight"
    package.mkdir(parents=True)
    missing = "raise ModuleNotFoundError(\"No module named 'sglang_inflight'\")\n"
    (package / "__init__.py").write_text(missing)
    return {"PYTHONPATH": str(folder)}


def without_plugin(folder: Path) -> dict[str, str]:
    return {"SGLANG_PLUGINS": "inflight_reference"}


@pytest.mark.parametrize(
    ("differ", "reason"),
    [
        (with_other_code, "sglang-inflight is .* in the driver, and .* on Ray's node"),
        (without_package, "No module named 'sglang_inflight'"),
        (without_plugin, "has not loaded SGLang Inflight on Ray's node"),
    ],
)
def test_node_that_differs_is_named_at_the_start(
    pool: ServerPool,
    checkpoints: Path,
    tmp_path: Path,
    differ: Callable[[Path], dict[str, str]],
    reason: str,
) -> None:
    pool.discard()
    flags = ("--tp-size", "2", "--nnodes", "2")
    with ray_cluster(gpus=1) as cluster:
        cluster.add_node(differ(tmp_path / "second"), gpus=1)
        server = serve_on_ray(
            cluster,
            checkpoints / "v0",
            *flags,
            log=tmp_path / "server.log",
            # actors import from the driver's folder first
            cwd=tmp_path,
        )
        with pytest.raises(RuntimeError, match=reason), server:
            pass


def test_unsupported_server_runs_without_us_if_asked(
    pool: ServerPool, cluster: RayCluster, tmp_path: Path
) -> None:
    pool.discard()
    env = {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1", "SGLANG_INFLIGHT_UNSUPPORTED": "off"}
    log, flags = tmp_path / "server.log", ("--pp-size", "2")
    model = marker.build_stages(tmp_path / "v0", 0)
    with serve_on_ray(cluster, model, *flags, log=log, env=env) as server:
        assert server.get("/inflight/status")["active"] is False
        output = Generation(server, tokens=3, stream=False).output()
        assert len(output.tokens) == 3
        assert "kv_versions" not in output.meta


@pytest.mark.parametrize("flags", [("--tp-size", "2", "--nnodes", "2"), ("--dp-size", "2")])
def test_server_on_a_cpu_needs_no_gpu_of_ray(
    pool: ServerPool, checkpoints: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    pool.discard()
    with ray_cluster(gpus=0) as cluster:
        cluster.add_node(gpus=0)
        log = tmp_path / "server.log"
        with serve_on_ray(cluster, checkpoints / "v0", *flags, log=log) as server:
            expect_served(server, 0)
            assert len(status(server)["ranks"]) == 2
