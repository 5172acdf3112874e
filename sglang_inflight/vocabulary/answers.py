"""Answers of all calls. Imports no SGLang, because trainers read answers too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with fields as attributes and as keys, like a JSON object.

    An answer is no ``dict``. ``as_json`` converts it, nested answers included.
    """

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return content

    def __getitem__(self, name: str) -> Any:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def __len__(self) -> int:
        return len(self.__struct_fields__)

    def __contains__(self, name: object) -> bool:
        return name in self.__struct_fields__

    def keys(self) -> tuple[str, ...]:
        return self.__struct_fields__

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


# registered, not inherited: Mapping and Struct have different metaclasses
Mapping.register(Answer)


# ---- status ---------------------------------------------------------------------------

PauseMode = Literal["abort", "in_place", "retract", "wait"]
# what becomes of requests that arrive in a pause
NewRequests = Literal["queue", "reject"]
# prefill or decode server of a pair; "both" without disaggregation
Role = Literal["prefill", "decode", "both"]

# pause_id of the pause held while memory is released
MEMORY = "memory"


class Holder(Answer, frozen=True, kw_only=True):
    """One held pause."""

    pause_id: str
    mode: PauseMode
    # None: no lease
    lease_left_s: float | None
    new_requests: NewRequests = "queue"


class PauseStatus(Answer, frozen=True, kw_only=True):
    # "running", "draining" or "frozen"
    state: str
    paused: bool
    # mode of the latest held pause
    mode: PauseMode | None
    holders: tuple[Holder, ...]
    # "reject" if a holder says so
    new_requests: NewRequests = "queue"
    # counts of requests
    running: int
    waiting: int


class Served(Answer, frozen=True, kw_only=True):
    """The served version."""

    weight_version: str
    epoch: int


class Expected(Answer, frozen=True, kw_only=True):
    """The server knows its fleet's version. ``weight_version`` is the one that it serves itself."""

    success: bool = True
    message: str
    weight_version: str
    # why the server takes no new requests until then; None if it serves the fleet's version
    behind: str | None


class Drained(Answer, frozen=True, kw_only=True):
    """The server drains, or takes new requests again."""

    success: bool = True
    message: str
    draining: bool
    # requests that ran and waited at the call
    requests: int


class WeightsStatus(Answer, frozen=True, kw_only=True):
    """The served weights."""

    weight_version: str
    # commits and rollbacks so far
    epoch: int
    # None before the first commit, and while weights are lost or hollow
    digest: str | None
    # target of a rollback
    previous_version: str | None
    # requests whose every token the previous version makes
    pinned_to_previous: int = 0
    # equal on servers whose ranks hold the same tensors in the same layout
    layout: str = ""


# state of an intact group in ``StagingStatus.groups``
CONTROL_SYNC = "in step"


class StagedChanges(Answer, frozen=True, kw_only=True):
    """The form of a staged update, and its size.

    ``form``: "changes", "changes on host" (they outgrew their budget on the device), "device",
    "host" or "off" (written in place). The counts are 0 unless the form is one of changes.
    """

    form: str
    # elements of this server's weights that differ, and their share of all of the update's models
    changed_elements: int = 0
    changed_fraction: float = 0.0
    # most memory that changes took on a rank, on its device and on the host
    staging_bytes_peak: int = 0
    # why it is not the form of ``staging.mode``; else None
    why: str | None = None


class Proof(Answer, frozen=True, kw_only=True):
    """Whether SGLang's finishing of a model after loading can be repeated beside the served one.

    ``state``: "due" (at the first update), "done" or "failed" (updates are written in place).
    """

    state: str
    # the first tensor that differs, in a sentence
    why: str | None = None


class Ways(Answer, frozen=True, kw_only=True):
    """How the tensors of the start's checkpoint come into the weights of one model of a rank.

    ``planned``: moved to where its loader has put them before. ``finished``: loaded and finished by
    SGLang's own steps. ``by_loader``: loaded by the model's loader. Each has how many ``tensors``
    and ``bytes`` of the checkpoint. Tensors that the rank has no use for are in none of them.
    """

    planned: dict[str, int]
    finished: dict[str, int]
    by_loader: dict[str, int]
    # a reason not to plan a tensor -> one tensor of it
    why: dict[str, str] = {}


class StagingStatus(Answer, frozen=True, kw_only=True):
    """The open update, and whether the next one can be taken."""

    # "changes", "device", "host" or "off"
    mode: str
    # "empty", "open" or "sealed"
    state: str
    update_id: str | None
    tensors: int
    bytes: int
    can_roll_back: bool
    # why the live weights are partially written
    dirty: str | None
    # why the server takes no updates
    refusal: str | None
    # trainers' groups: name -> state
    groups: dict[str, str]
    # form -> how many tokens of KV have the size of the memory that it keeps between updates
    kv_tokens: dict[str, int] = {}
    # how this rank staged the last committed update
    staged_as: StagedChanges | None = None
    # None for models that SGLang does not finish after loading
    proof: Proof | None = None
    # each role ("target", "draft") has its own, once the first update has found it
    ways: dict[str, Ways] = {}


# states of released memory in ``MemoryStatus``
GONE = ("away", "lost")


class MemoryStatus(Answer, frozen=True, kw_only=True):
    """State of each kind of memory.

    "present"; "away": released, and restored by a resume; "lost": released without a copy;
    "hollow": resumed, with contents still to be sent.
    """

    weights: str = "present"
    kv_cache: str = "present"
    cuda_graph: str = "present"
    # why no request is served: updates must bring all weights first
    hollow: str | None = None


class Capabilities(Answer, frozen=True, kw_only=True):
    """For each thing that a server may do: None if it can, else the reason.

    The reason is a sentence with the cause and a way out. ``capabilities.py`` writes it.
    """

    # pauses with our modes, holders and leases
    pause: str | None = None
    # a pause in mode "retract"
    retract: str | None = None
    # updates written beside the served weights
    stage: str | None = None
    # updates written over the served weights, between two steps
    in_place: str | None = None
    # kv_cache="fence": later requests reuse no prefix of older weights
    fence: str | None = None
    # kv_cache="recompute" and flushes, while requests run
    recompute: str | None = None
    # kv_max_age above 0: KV is kept up to an age
    kv_max_age: str | None = None
    # release of memory while requests wait, with a choice about the weights
    keep_weights: str | None = None
    # running="move": running requests pass to the adapter that takes their adapter's name
    move_adapters: str | None = None
    # requests that name the version of their tokens' weights
    pin: str | None = None
    # requests that emit given tokens
    forced_tokens: str | None = None
    # requests that go on from the output that they have had at another server
    continued: str | None = None


class State(PauseStatus, frozen=True, kw_only=True):
    """The status of pauses, weights, staging and memory.

    A struct has one parent, so the fields of ``WeightsStatus`` are repeated here.
    """

    weight_version: str
    epoch: int
    digest: str | None
    previous_version: str | None
    pinned_to_previous: int = 0
    layout: str = ""
    staging: StagingStatus
    # the default covers servers without a memory saver
    memory: MemoryStatus = MemoryStatus()


class RankStatus(State, frozen=True, kw_only=True):
    dp_rank: int
    tp_rank: int
    pp_rank: int


class Status(State, frozen=True, kw_only=True):
    """The first rank's state, and every rank's. ``paused`` is true if any rank is paused."""

    # an inactive server answers ``Inactive`` instead
    active: bool = True
    # version of the server's distribution
    inflight_version: str = ""
    # name of the server's process: another one after a restart at the same address
    instance: str = ""
    role: Role = "both"
    # why the server takes no new requests: its fleet serves another version
    behind: str | None = None
    # why the server leaves its fleet: it drains
    draining: str | None = None
    # names of the extensions that are on
    extensions: tuple[str, ...] = ()
    capabilities: Capabilities
    ranks: Annotated[tuple[RankStatus, ...], msgspec.Meta(min_length=1)]


# kind of server in a gateway's list; "regular" without disaggregation
WorkerType = Literal["regular", "prefill", "decode"]


class EntryUpdate(Answer, frozen=True, kw_only=True):
    """The open update, as in ``StagingStatus``."""

    state: str
    update_id: str | None
    can_roll_back: bool
    # why some rank takes no updates
    refusal: str | None


class EntryPause(Answer, frozen=True, kw_only=True):
    """The pause, as in ``PauseStatus``, with a count of its holders."""

    state: str
    paused: bool
    mode: PauseMode | None
    new_requests: NewRequests
    holders: int


class WorkerAbilities(Answer, frozen=True, kw_only=True):
    """Abilities of a server, without the reasons in ``Capabilities``."""

    pause_modes: tuple[PauseMode, ...]
    # sources of updates: the last words of the calls' names
    update_from: tuple[str, ...]
    abort: bool = True
    flush_cache: bool = True
    sleep_wake: bool
    reports_weight_version: bool = True
    sessions: bool
    # a refused update changes nothing on any rank
    two_phase: bool
    transparent: bool
    kv_max_age: bool
    pin: bool


class WorkerEntry(Answer, frozen=True, kw_only=True):
    """A server's entry in a gateway's list. Its size does not grow with the ranks."""

    protocol_version: int = 1
    engine: str = "sglang"
    engine_version: str
    inflight_version: str
    # gateways have two names for the served model's name
    model: str
    model_id: str
    # latest checkpoint that was served from disk
    model_path: str
    worker_type: WorkerType
    connection_mode: str = "http"
    tp_size: int
    dp_size: int
    pp_size: int
    # ranks of all replicas
    world_size: int
    health: Literal["ready", "not_ready"]
    why_not_ready: str | None
    weight_version: str
    epoch: int
    # the lowest and the highest of the ranks
    epochs: tuple[int, int]
    digest: str | None
    previous_version: str | None
    update: EntryUpdate
    pause: EntryPause
    capabilities: WorkerAbilities
    # paths of HTTP calls, without the first slash
    routes: tuple[str, ...]


class Inactive(Answer, frozen=True, kw_only=True):
    """Status of a server running without SGLang Inflight, with the reason."""

    active: bool = False
    message: str


def describe_inactive(why: str) -> dict[str, Any]:
    return Inactive(message=why).as_json()


# ---- updates --------------------------------------------------------------------------


class RankReceipt(Answer, frozen=True, kw_only=True):
    """One rank's commit. Equal weights have equal digests, whatever their source."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    success: bool = True
    message: str = ""
    digest: str
    # digest of all tensors that came to the rank, as they were sent; None if nobody asked for it
    received_digest: str | None = None


class Receipt(Answer, frozen=True, kw_only=True):
    """Proof of the served weights, rank by rank."""

    success: bool = True
    message: str
    weight_version: str
    base_version: str
    # commits and rollbacks so far
    epoch: int
    # the slowest rank's time, summed over the calls of a session
    staged_s: float
    # longest time that the commit held a rank's loop
    stall_ms: float
    # seconds for which requests waited for weights written in place
    held_s: float = 0.0
    bytes: int
    tensors: int
    # requests sent back to the queue
    retracted: int
    # None for a rollback
    staged_as: StagedChanges | None = None
    # how many tensors were quantized on arrival, by what came and what is served
    quantized: dict[str, int] = {}
    # what the update has not taken over from a checkpoint, in sentences
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankReceipt, ...]


class StagedSoFar(Answer, frozen=True, kw_only=True):
    """A session's staged tensors, not served yet. ``weight_version`` is the served version.

    ``unpatched``: names of tensors that have to come whole, because parts of some were not taken.
    """

    success: bool = True
    message: str
    weight_version: str
    staged_s: float
    bytes: int
    tensors: int
    unpatched: tuple[str, ...] = ()


class Begun(Answer, frozen=True, kw_only=True):
    """A session was opened, or its lease was renewed."""

    success: bool = True
    message: str
    session_id: str


class RankSaved(Answer, frozen=True, kw_only=True):
    """The files of one rank. ``digest`` is as in a receipt."""

    tp_rank: int
    pp_rank: int
    digest: str
    bytes: int


class Saved(Answer, frozen=True, kw_only=True):
    """The served weights are in the folder ``path``, one set of files for each rank."""

    success: bool = True
    message: str
    path: str
    weight_version: str
    seconds: float
    bytes: int
    ranks: tuple[RankSaved, ...]


class RankOffered(Answer, frozen=True, kw_only=True):
    """Where one rank sends its weights. ``digest`` is as in a receipt, None if it is not known."""

    tp_rank: int
    pp_rank: int
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    digest: str | None = None


class Offered(Answer, frozen=True, kw_only=True):
    """Each rank sends the served weights to whoever has the ``token``, for ``seconds``."""

    success: bool = True
    message: str
    offer_id: str
    # a secret
    token: str
    weight_version: str
    seconds: float
    ranks: tuple[RankOffered, ...]


# ---- pauses and memory ----------------------------------------------------------------


class RankGrant(Answer, frozen=True, kw_only=True):
    """Counts of one rank's requests at the pause."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    running: int
    waiting: int
    retracted: int
    aborted: int


class Grant(Answer, frozen=True, kw_only=True):
    """Every rank is paused. ``pause_id`` renews and releases the pause."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode | None
    pause_id: str
    weight_version: str
    ranks: tuple[RankGrant, ...]


class NamelessGrant(Answer, frozen=True, kw_only=True):
    """SGLang's own pause has ended all requests (``frontend/sglangs_pause.py``)."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode = "abort"
    weight_version: str


class Release(Answer, frozen=True, kw_only=True):
    """One pause or all were released. ``paused`` is true if another one is still held."""

    status: str = "ok"
    message: str
    paused: bool


class RankMemory(Answer, frozen=True, kw_only=True):
    """Memory released or resumed by one rank."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    # kind of memory -> bytes; "shadow" is the second copy of the weights
    bytes: dict[str, int]
    seconds: float


class MemoryMoved(Answer, frozen=True, kw_only=True):
    """Every rank released or resumed memory.

    ``paused`` is true if generation is paused afterwards. ``hollow`` says why weights must be sent
    first.
    """

    status: str = "ok"
    success: bool = True
    message: str
    paused: bool
    hollow: str | None = None
    ranks: tuple[RankMemory, ...] = ()


class WindowGrant(Answer, frozen=True, kw_only=True):
    """Transparent mode: generation goes on, and weights sent from here on go live in flight.

    ``paused`` is true if generation had to pause all the same.
    """

    status: str = "ok"
    message: str
    paused: bool
    mode: PauseMode
    transparent: bool = True
    weight_version: str


class WindowRelease(Answer, frozen=True, kw_only=True):
    """The end of a transparent pause. ``receipt`` is None if no weights were sent."""

    status: str = "ok"
    message: str
    paused: bool
    receipt: Receipt | None


class Deferred(Answer, frozen=True, kw_only=True):
    """Transparent mode recorded the call. ``continue_generation`` performs it."""

    success: bool = True
    message: str
