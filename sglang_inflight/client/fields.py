"""Fields that the client's calls pass to the server. docs/guide explains them.

``vocabulary/bodies.py`` has their defaults. The client sets the other fields of a body itself.

A call with ``on_progress`` reports the progress of its staging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from sglang_inflight.vocabulary.answers import Status
from sglang_inflight.vocabulary.bodies import OnBusy, Selector
from sglang_inflight.vocabulary.kept_kv import KVPolicy


class UpdateOptions(TypedDict, total=False):
    """Fields of every update, but for its tensors and their version."""

    flush_cache: bool
    torch_empty_cache: bool
    non_blocking: bool
    kv_cache: KVPolicy | None
    kv_max_age: int | None
    expected_version: str | None
    partial: bool | None
    on_busy: OnBusy
    timeout_s: float | None
    selector: Selector | None
    abort_all_requests: bool
    expected_digests: dict[str, str] | None
    expected_digest: str | None
    received_digest: bool


class DiskOptions(UpdateOptions, total=False):
    """Fields of an update from disk, but for its folder and version."""

    load_format: str | None
    is_async: bool
    keep_pause: bool
    token_step: int
    recapture_cuda_graph: bool
    manifest: dict[str, Any] | None


class UpdateFields(DiskOptions, total=False):
    """Fields of all updates."""

    weight_version: str | None
    # an update from disk
    model_path: str
    # an update from tensors, in base64
    serialized_named_tensors: list[str]
    # a broadcast, or a bucket of tensors
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    # ``layout_digest`` computes it from the three lists
    layout_digest: str | None
    group_name: str
    # an update from another server's offer
    offer_id: str
    token: str
    ranks: list[dict[str, Any]]
    # an update from a checkpoint engine
    zmq_handles: dict[str, str]


class FleetDiskOptions(DiskOptions, total=False):
    lease_s: float


class FleetFields(UpdateFields, total=False):
    """Fields of an update, and of its session."""

    lease_s: float


class BeginFields(TypedDict, total=False):
    """Fields of a session's begin."""

    selector: Selector | None
    expected_version: str | None
    on_busy: OnBusy
    received_digest: bool


class SessionFields(BeginFields, total=False):
    """Fields of a session, but for its version and ``partial``."""

    kv_cache: KVPolicy | None
    kv_max_age: int | None
    lease_s: float
    on_progress: OnProgress | None
    expected_digest: str | None


@dataclass(frozen=True)
class Progress:
    """Staged tensors of a server's slowest rank."""

    url: str
    # "empty", "open" or "sealed"
    state: str
    tensors: int
    bytes: int

    @classmethod
    def read(cls, url: str, status: Status) -> Progress:
        """Read the progress from an answer of ``/inflight/status``."""
        slowest = min((rank.staging for rank in status.ranks), key=lambda staging: staging.bytes)
        return cls(url, slowest.state, slowest.tensors, slowest.bytes)


OnProgress = Callable[[Progress], None]
