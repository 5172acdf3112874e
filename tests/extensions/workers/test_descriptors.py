"""Without free file descriptors, a worker refuses the calls that it would forward."""

from __future__ import annotations

from pathlib import Path

from harness.server import Server
from sglang_inflight.extensions.workers.forward import HERE
from tests.support import descriptors
from tests.support.descriptors import LARGE, connected, expect_recovered, expect_refused
from tests.support.routes import routes
from tests.support.updates import serving
from tests.support.workers import until_all_serve

pytest_plugins = ["tests.support.fixtures"]


def test_forwarded_call_is_refused_when_a_worker_has_no_descriptor(
    workers_server: Server, checkpoints: Path
) -> None:
    both = until_all_serve(workers_server, 2)
    before = serving(workers_server)
    with connected(workers_server) as client:
        counts = {worker: descriptors.count(worker) for worker in both}
        handed_on = [route for route in routes(workers_server) if route.path not in HERE]
        assert handed_on
        with descriptors.none_left(*both):
            for route in handed_on:
                expect_refused(client.request(route.method, route.path, json=LARGE))
        assert serving(workers_server) == before
        expect_recovered(workers_server, checkpoints, counts)
