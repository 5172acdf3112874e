"""Prometheus metrics: of the front end, and of one replica's pauses, staging and commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_inflight.messages import (
    DiskSource,
    DistributedSource,
    GPUMemorySource,
    IPCSource,
    PartsSource,
    PeerSource,
    SavedFolderSource,
    Source,
    SparseFolderSource,
    TensorSource,
)
from sglang_inflight.sglang_types import get_observability, get_parallel
from sglang_inflight.vocabulary.answers import StagedChanges

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

_STALL_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
# labels of SGLang's own metric
_SOURCES: dict[type[Source], str] = {
    DiskSource: "disk",
    SparseFolderSource: "disk",
    SavedFolderSource: "disk",
    DistributedSource: "distributed",
    PartsSource: "distributed",
    PeerSource: "distributed",
    TensorSource: "tensor",
    IPCSource: "ipc",
    GPUMemorySource: "ipc",
}
_GRANT_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Metrics:
    """Gauges and counters of one replica, kept by its first rank. Any thread may count.

    ``/metrics`` has them with ``--enable-metrics``. Without the option they are still counted.
    """

    def __init__(self, sglangs: SchedulerMetricsCollector | None) -> None:
        """``sglangs`` is SGLang's collector of this rank, or None without one."""
        # import late: at its import prometheus_client decides if processes share values
        from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

        parallel = get_parallel()
        is_first = parallel.tp_rank == 0 and parallel.pp_rank == 0
        shown = get_observability().enable_metrics and is_first
        registry = REGISTRY if shown else CollectorRegistry()
        labels = {"dp_rank": str(parallel.dp_rank or 0)}

        def gauge(name: str, help: str) -> Gauge:
            all_replicas = Gauge(
                name, help, list(labels), registry=registry, multiprocess_mode="mostrecent"
            )
            return all_replicas.labels(**labels)

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, list(labels), registry=registry).labels(**labels)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            all_replicas = Histogram(name, help, list(labels), registry=registry, buckets=buckets)
            return all_replicas.labels(**labels)

        def counters(name: str, help: str, label: str) -> Callable[[str], Counter]:
            by_label = Counter(name, help, [*labels, label], registry=registry)
            return lambda value: by_label.labels(**labels, **{label: value})

        def gauges(name: str, help: str, label: str) -> Callable[[str], Gauge]:
            by_label = Gauge(
                name, help, [*labels, label], registry=registry, multiprocess_mode="mostrecent"
            )
            return lambda value: by_label.labels(**labels, **{label: value})

        # makers of an extension's own metrics; with a further label, of one for each of its values
        self.counter, self.gauge, self.histogram = counter, gauge, histogram
        self.counters, self.gauges = counters, gauges
        self.paused = gauge("sglang:inflight_paused", "1 while generation is frozen.")
        self.epoch = gauge("sglang:inflight_epoch", "Commits and rollbacks since the start.")
        self.paused_seconds = counter(
            "sglang:inflight_paused_seconds", "Time for which generation was frozen."
        )
        self.retracted = counter(
            "sglang:inflight_retracted_requests", "Requests retracted by a commit or a pause."
        )
        self.recomputed = counter(
            "sglang:inflight_recomputed_tokens", "Tokens whose KV was released to be recomputed."
        )
        self.prefill_mismatches = counter(
            "sglang:inflight_prefill_mismatched_requests",
            "Requests from a prefill server with another version than this server's.",
        )
        self.staged_bytes = counter("sglang:inflight_staged_bytes", "Bytes staged by this rank.")
        self.staged_seconds = counter(
            "sglang:inflight_staged_seconds", "Time of this rank's staging."
        )

        self.changed_elements = counter(
            "sglang:inflight_changed_elements", "Elements of this rank that updates changed."
        )
        self.changed_fraction = gauge(
            "sglang:inflight_changed_fraction", "Share of them in the weights, in the last update."
        )
        self.staging_peak = gauge(
            "sglang:inflight_staging_peak_bytes", "Most memory that the last update's staging took."
        )

        self.audited = counter(
            "sglang:inflight_audited_tensors", "Tensors that went by the model's loader, too."
        )
        self.audit_differences = counter(
            "sglang:inflight_audit_differences", "Updates that a load plan would have got wrong."
        )
        self.commit_stall = histogram(
            "sglang:inflight_commit_stall_seconds",
            "How long a commit held up steps: the scheduler's loop, or the device.",
            _STALL_S,
        )
        self.paused.set(0)
        self.epoch.set(0)
        self._sglangs = sglangs

    def observe_changes(self, staged_as: StagedChanges) -> None:
        """Count what a staged update changes. Forms without changes count nothing."""
        self.changed_elements.inc(staged_as.changed_elements)
        self.changed_fraction.set(staged_as.changed_fraction)
        self.staging_peak.set(staged_as.staging_bytes_peak)

    def observe_audit(self, audited: int, different: int) -> None:
        """Count tensors that load plans were compared with, and updates refused for it."""
        self.audited.inc(audited)
        self.audit_differences.inc(different)

    def observe_load(self, source: Source, seconds: float) -> None:
        """Count the staging time of one call of an update, in SGLang's own metric too."""
        self.staged_seconds.inc(seconds)
        if self._sglangs is not None:
            self._sglangs.observe_weight_load(seconds, _SOURCES[type(source)])


class FrontEndMetrics:
    """FrontEndMetrics shown at ``/metrics`` with ``--enable-metrics``."""

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
