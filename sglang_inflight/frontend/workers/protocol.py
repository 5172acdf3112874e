"""What crosses between the owner and a worker besides calls: a line of JSON each."""

from __future__ import annotations

import msgspec

# bytes; a line names every adapter, or every request that moves, and asyncio's limit is 64 KiB
LONGEST_LINE = 64 << 20


# how many requests use an adapter, by its id; none that nobody uses
Uses = dict[str, int]


class Adapter(msgspec.Struct, frozen=True):
    """A row of SGLang's registry."""

    lora_id: str
    lora_name: str | None
    lora_path: str | None
    pinned: bool | None


class ServerState(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What SGLang's readers in a worker are to know of the server, all of it each time."""

    # counts up; what a worker has heard of it says by this
    number: int = 0
    weight_version: str
    # of the last update from disk
    model_path: str
    load_format: str
    # no worker that waits for a checkpoint engine waits any longer
    initial_weights_loaded: bool
    paused: bool
    # weights are missing, and requests would end with 503
    hollow: bool
    # how often preprocessed images and the like were to be forgotten
    forgotten: int
    # adapters that requests find, and those that they may have loaded again
    adapters: tuple[Adapter, ...]
    reloadable: tuple[Adapter, ...]


class Moved(msgspec.Struct, tag=True, frozen=True):
    """Requests that go on with another adapter, whichever worker has them."""

    rids: list[str]
    from_id: str
    to_id: str


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End the requests of these names, whichever worker has them."""

    number: int
    names: list[str]


class Ack(msgspec.Struct, tag=True, frozen=True):
    """A worker acts on the state of this number, and on all before it."""

    number: int


class Aborted(msgspec.Struct, tag=True, frozen=True):
    """The schedulers have been told to end ``count`` requests of a worker's."""

    number: int
    count: int


class AdapterRefs(msgspec.Struct, tag=True, frozen=True):
    """All that a worker's requests use now."""

    uses: Uses


class Idle(msgspec.Struct, tag=True, frozen=True):
    """A worker that was told to go has no request any more."""


Told = ServerState | Moved | Abort
Said = Ack | Aborted | AdapterRefs | Idle

read_told = msgspec.json.Decoder(ServerState | Moved | Abort).decode
read_said = msgspec.json.Decoder(Ack | Aborted | AdapterRefs | Idle).decode


def line(content: Told | Said) -> bytes:
    return msgspec.json.encode(content) + b"\n"
