"""What the front end tells Prometheus: how calls ended, and how long pauses took to take."""

from __future__ import annotations

from sglang_inflight.sglang_types.runtime_context import get_observability

_GRANT_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Metrics:
    """Shown at ``/metrics`` where the server runs with ``--enable-metrics``."""

    def __init__(self) -> None:
        # not sooner: when it is imported it settles whether processes share their values
        from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

        registry = REGISTRY if get_observability().enable_metrics else CollectorRegistry()
        self.pause_grant = Histogram(
            "sglang:inflight_pause_grant_seconds",
            "From the call of a pause until every rank stood still.",
            ["mode"],
            registry=registry,
            buckets=_GRANT_S,
        )
        self.updates = Counter(
            "sglang:inflight_updates",
            "Updates that began, by how they ended: committed, dropped, rolled_back.",
            ["result"],
            registry=registry,
        )
