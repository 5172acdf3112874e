"""Digests in a transparent pause."""

from __future__ import annotations

from harness import marker
from harness.server import Server
from tests.support.updates import (
    expect_served,
    refuse,
    serving,
    succeed,
    tensor_body,
)
from tests.test_expected_digests import BEGIN, END, TENSOR, altered, digest_of, received

pytest_plugins = ["tests.support.fixtures"]


def test_transparent_pause_compares_the_digest_of_its_session(transparent_server: Server) -> None:
    server = transparent_server
    for weights, right in (altered(1), False), (marker.tensors(1), True):
        before = serving(server)
        succeed_pause = server.post("/pause_generation", {"mode": "in_place"})
        assert succeed_pause["status_code"] == 200
        succeed(server.post(BEGIN, {"received_digest": True}))
        succeed(server.post(TENSOR, tensor_body(weights)))
        expected = digest_of(marker.tensors(1))
        succeed(server.post(END, {"expected_digest": expected, "weight_version": "v1"}))
        continued = server.post("/continue_generation", {})
        if right:
            assert received(continued["receipt"]) == [expected]
            expect_served(server, 1)
        else:
            refuse(continued, expected)
            assert serving(server) == before
