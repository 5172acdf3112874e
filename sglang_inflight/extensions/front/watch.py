"""The front's memory: counts for Prometheus, and the last moves for its page.

All of it belongs to the front's event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_inflight.client.answers import Json
from sglang_inflight.client.rollouts.servers import Place
from sglang_inflight.client.rollouts.watching import End, Move, Watcher

PREFIX = "sglang_inflight_front_"
_MOVE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_LAST_MOVES = 50


class Watch(Watcher):
    """Counts the rollouts of one front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._running = Gauge(
            PREFIX + "running_rollouts", "Rollouts that go on.", registry=self.registry
        )
        self._ends = Counter(
            PREFIX + "rollouts", "Rollouts that ended.", ["end"], registry=self.registry
        )
        self._moves = Counter(
            PREFIX + "moves", "Moves to another server.", ["why"], registry=self.registry
        )
        self._seconds = Histogram(
            PREFIX + "move_seconds",
            "From a server's end of a rollout to the next one's first token.",
            registry=self.registry,
            buckets=_MOVE_S,
        )
        self._last: deque[Json] = deque(maxlen=_LAST_MOVES)

    def begins(self) -> None:
        self._running.inc()

    def moved(self, move: Move) -> None:
        self._moves.labels(why=move.why).inc()
        self._seconds.observe(move.seconds)
        self._last.append({"at": time.time(), **asdict(move)})

    def ends(self, how: End) -> None:
        self._running.dec()
        self._ends.labels(end=how).inc()

    def watch(self, places: Iterable[Place]) -> None:
        """Tell of the servers, too."""
        self.registry.register(_Fleet(places))

    def describe(self) -> Json:
        """Return the rollouts that go on, those that ended by their end, and the last moves.

        The last move is the first of ``moves``. Times are in seconds since 1970.
        """
        ends = {
            sample.labels["end"]: int(sample.value)
            for family in self._ends.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        return {
            "running": int(self.registry.get_sample_value(PREFIX + "running_rollouts") or 0),
            "ended": ends,
            "moved": int(self.registry.get_sample_value(PREFIX + "move_seconds_count") or 0),
            "moves": [*reversed(self._last)],
        }


class _Fleet(Collector):
    """The servers, as the front saw them last."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = places

    def collect(self) -> Iterator[Metric]:
        epochs = GaugeMetricFamily(
            PREFIX + "server_epoch",
            "The epoch of a server that answers, with its version.",
            labels=["server", "weight_version"],
        )
        ready = GaugeMetricFamily(
            PREFIX + "server_ready", "1: it takes rollouts.", labels=["server"]
        )
        rollouts = GaugeMetricFamily(
            PREFIX + "server_rollouts", "This front's rollouts there.", labels=["server"]
        )
        for place in self._places:
            if place.status is not None:
                version = str(place.status.weight_version)
                epochs.add_metric([place.url, version], place.status.epoch)
            ready.add_metric([place.url], place.why_not is None)
            rollouts.add_metric([place.url], place.requests)
        yield from (epochs, ready, rollouts)


def describe_server(place: Place) -> Json:
    """Return a server's state, for the page and ``/inflight/fleet``."""
    status = place.status
    return {
        "url": place.url,
        "ready": place.why_not is None,
        "why_not": place.why_not,
        "weight_version": status and status.weight_version,
        "epoch": status and status.epoch,
        "paused": status and status.paused,
        "running": status and status.running,
        "waiting": status and status.waiting,
        "rollouts": place.requests,
    }
