"""Prometheus metrics of the front end: outcomes of updates, seconds to grant a pause."""

from __future__ import annotations

from sglang_inflight.sglang_types import get_observability

_GRANT_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Metrics:
    """Metrics shown at ``/metrics`` with ``--enable-metrics``."""

    def __init__(self) -> None:
        # imported late: the import fixes whether processes share their values
        from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

        registry = REGISTRY if get_observability().enable_metrics else CollectorRegistry()
        self.pause_grant = Histogram(
            "sglang:inflight_pause_grant_seconds",
            "Seconds from a pause's call until every rank was paused.",
            ["mode"],
            registry=registry,
            buckets=_GRANT_S,
        )
        self.updates = Counter(
            "sglang:inflight_updates",
            "Updates begun, by outcome: committed, dropped, rolled_back.",
            ["result"],
            registry=registry,
        )
