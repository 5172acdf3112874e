"""A Ray cluster for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ray_cluster import RayCluster, ray_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """Two nodes. The first one's environment has a setting that no driver has."""
    with ray_cluster({"SGLANG_INFLIGHT_STAGING": "host"}) as cluster:
        cluster.add_node()
        yield cluster
