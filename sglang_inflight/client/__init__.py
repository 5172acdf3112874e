"""Clients for trainers, with and without an event loop. Imports no SGLang.

one server   ``Client``   ``AsyncClient``
many         ``Fleet``    ``AsyncFleet``

A fleet also makes rollouts, which go on when their server dies.

``Sender`` broadcasts a trainer's weights to one server or many, and ``ShardSender`` sends those of
a sharded trainer. ``changes_since``, ``Snapshot`` and ``write_changes`` find and write what a
version changes. ``digests`` says what is sent, for the server to compare. These need torch.
``layout_digest`` names the layout of tensors, so that it is sent once. ``spans`` reads each token's
version from an answer.
"""

import warnings
from typing import TYPE_CHECKING, Any

from sglang_inflight.client.answers import NoAnswer, Session, WrongAnswer
from sglang_inflight.client.async_client import AsyncClient
from sglang_inflight.client.async_fleet import AsyncFleet
from sglang_inflight.client.blocking import Client, Fleet
from sglang_inflight.client.changes import Snapshot, changes_since
from sglang_inflight.client.changes_folder import write_changes
from sglang_inflight.client.fields import Progress
from sglang_inflight.client.report import FleetRefused, FleetSplit, PauseLost, Report
from sglang_inflight.client.returning import CaughtUp, FleetTable, VersionUnclear
from sglang_inflight.client.rollouts.rollouts import RolloutLost
from sglang_inflight.client.sender import GroupFailed, Sender
from sglang_inflight.client.shard_parts import Shard
from sglang_inflight.client.shard_sender import ShardSender
from sglang_inflight.client.spans import (
    Span,
    cover_exactly,
    in_order,
    read_spans,
    version_per_token,
)
from sglang_inflight.tensor_digest import digest, digest_of_all, digests
from sglang_inflight.vocabulary.answers import (
    Begun,
    Drained,
    Expected,
    Grant,
    MemoryMoved,
    Receipt,
    Release,
    Saved,
    Served,
    StagedSoFar,
    Status,
    WorkerEntry,
)
from sglang_inflight.vocabulary.deprecations import of_kind
from sglang_inflight.vocabulary.layouts import layout_digest

__all__ = [
    "AsyncClient",
    "AsyncFleet",
    "Begun",
    "CaughtUp",
    "Client",
    "Drained",
    "Expected",
    "Fleet",
    "FleetRefused",
    "FleetSplit",
    "FleetTable",
    "Grant",
    "GroupFailed",
    "MemoryMoved",
    "NoAnswer",
    "PauseLost",
    "Progress",
    "Receipt",
    "Release",
    "Report",
    "RolloutLost",
    "Saved",
    "Sender",
    "Served",
    "Session",
    "Shard",
    "ShardSender",
    "Snapshot",
    "Span",
    "StagedSoFar",
    "Status",
    "VersionUnclear",
    "WorkerEntry",
    "WrongAnswer",
    "changes_since",
    "cover_exactly",
    "digest",
    "digest_of_all",
    "digests",
    "in_order",
    "layout_digest",
    "read_spans",
    "version_per_token",
    "write_changes",
]


# mypy goes on to refuse names that are not there
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return what a deprecated name stands for, with a warning."""
        for each in of_kind("client"):
            if each.name == name:
                warnings.warn(each.sentence, DeprecationWarning, stacklevel=2)
                return globals()[each.replacement]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
