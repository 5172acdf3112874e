"""Messages between the owner and a worker.

A message is one line of JSON. Calls go by HTTP.
"""

from __future__ import annotations

import msgspec

from sglang_inflight.vocabulary.labels import VersionLabel

# bytes; a line may name every adapter or every moved request, and asyncio's default is 64 KiB
LONGEST_LINE = 64 << 20

# adapter's id -> number of its requests; only adapters in use
Uses = dict[str, int]


class Adapter(msgspec.Struct, frozen=True):
    """A row of SGLang's registry."""

    lora_id: str
    lora_name: str | None
    lora_path: str | None
    pinned: bool | None


class ServerState(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The server's whole state, as SGLang's readers in a worker need it."""

    # sequence number, repeated in a worker's ``Ack``
    number: int = 0
    weight_version: str
    # folder of the last update from disk
    model_path: str
    load_format: str
    # ends a worker's wait for a checkpoint engine
    initial_weights_loaded: bool
    paused: bool
    # the ranks' different labels of versions
    labels: tuple[VersionLabel, ...]
    # adapters' names and the versions of their last loads
    adapter_versions: tuple[tuple[str, str], ...]
    # a held pause rejects new requests
    rejects: bool
    # weights are missing, so workers answer requests with 503
    hollow: bool
    # why the server is behind its fleet, so workers answer new requests with 503
    behind: str | None
    # count of cache clears of preprocessed images
    forgotten: int
    # loaded adapters, and evicted ones that requests may reload
    adapters: tuple[Adapter, ...]
    reloadable: tuple[Adapter, ...]


class Moved(msgspec.Struct, tag=True, frozen=True):
    """Requests moved to another adapter, on any worker."""

    rids: list[str]
    from_id: str
    to_id: str


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Abort the requests of these names, on any worker."""

    number: int
    names: list[str]


class Ack(msgspec.Struct, tag=True, frozen=True):
    """A worker has applied the state of this number, and all before it."""

    number: int


class Aborted(msgspec.Struct, tag=True, frozen=True):
    """A worker has sent the schedulers aborts of ``count`` requests."""

    number: int
    count: int


class AdapterRefs(msgspec.Struct, tag=True, frozen=True):
    """A worker's current counts of adapters' requests."""

    uses: Uses


class Idle(msgspec.Struct, tag=True, frozen=True):
    """A worker that received SIGTERM has finished its last request."""


OwnerMessage = ServerState | Moved | Abort
WorkerMessage = Ack | Aborted | AdapterRefs | Idle

read_owner_message = msgspec.json.Decoder(ServerState | Moved | Abort).decode
read_worker_message = msgspec.json.Decoder(Ack | Aborted | AdapterRefs | Idle).decode


def line(content: OwnerMessage | WorkerMessage) -> bytes:
    return msgspec.json.encode(content) + b"\n"
