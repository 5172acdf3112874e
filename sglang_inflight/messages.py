"""Every message of ours that crosses a process.

The front end sends a ``…Call`` to the schedulers on SGLang's own request socket. SGLang
hands the call to every rank of a replica in the same pass of the loop. Each rank answers on its
own socket, so the front end sees a failure on any rank. The answer has the type named by the
call's ``answer``, or is ``Failed``.

Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import ClassVar, Literal, Protocol, TypeVar

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    BaseReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)

from sglang_inflight.vocabulary.answers import (
    Capabilities,
    MemoryStatus,
    PauseStatus,
    RankOffered,
    Role,
    StagedChanges,
    StagingStatus,
    WeightsStatus,
)
from sglang_inflight.vocabulary.answers import NewRequests as NewRequests
from sglang_inflight.vocabulary.answers import PauseMode as PauseMode
from sglang_inflight.vocabulary.bodies import BUCKETS as BUCKETS
from sglang_inflight.vocabulary.bodies import FLATTENED_BUCKET as FLATTENED_BUCKET
from sglang_inflight.vocabulary.bodies import SERVED as SERVED
from sglang_inflight.vocabulary.bodies import SPARSE as SPARSE
from sglang_inflight.vocabulary.bodies import SPARSE_BUCKET as SPARSE_BUCKET
from sglang_inflight.vocabulary.bodies import AdapterKVPolicy as AdapterKVPolicy
from sglang_inflight.vocabulary.bodies import Selector as Selector
from sglang_inflight.vocabulary.kept_kv import KeptKV

# in errors
SERVED_ELSEWHERE = "weights as another server serves them"

# rendezvous with a trainer: torch.distributed, or vLLM's StatelessProcessGroup
MeetBy = Literal["torch", "stateless"]

# names in a request's meta_info and custom_params
KV_VERSIONS = "kv_versions"
ADAPTER_VERSIONS = "adapter_versions"
RECORDS = "records"
# which forwards the rows of an answer come from: those that sampled its tokens, or those that made
# the KV in use at its end
Records = Literal["sampled", "recomputed"]

# prefix of a control request's id: every rank answers such a request of SGLang's
CONTROL_CALL = "inflight-control-"

NEEDS_ONE_GPU = (
    "CUDA IPC needs the trainer and the server on one machine, and a trainer's rank on the GPU "
    "of each server rank"
)

# a load_format: this rank's parameters, under the model's own names
DIRECT = "direct"

SPARSE_FORMATS = (SPARSE, SPARSE_BUCKET)
# tensors that the model's own loader takes
OF_CHECKPOINT = (None, FLATTENED_BUCKET, *SPARSE_FORMATS)


class DiskSource(msgspec.Struct, tag=True, kw_only=True):
    """A checkpoint in a directory that every rank can read."""

    model_path: str
    load_format: str | None = None


class SparseFolderSource(msgspec.Struct, tag=True, kw_only=True):
    """Sparse tensors in a directory that every rank can read, with a manifest."""

    model_path: str


class SavedFolderSource(msgspec.Struct, tag=True, kw_only=True):
    """Weights that another server has saved, in a directory that every rank can read."""

    model_path: str


class PeerSource(msgspec.Struct, tag=True, kw_only=True):
    """Weights that the ranks of another server send over the network."""

    offer_id: str
    token: str
    ranks: list[RankOffered]


class PayloadFile(msgspec.Struct, tag=True, kw_only=True):
    """A payload too large for a message, in an unnamed file of the front end's."""

    # under /proc; valid until the call is answered
    path: str


Payload = bytes | PayloadFile


class LaidOut(msgspec.Struct, kw_only=True):
    """A source with the layout of its tensors: whole, or by its digest.

    The front end empties long lists, and those with a digest. A layout that is new to the
    ranks comes in ``layout_parts`` instead: the scheduler's thread passes bytes on, and the staging
    thread decodes them. So no work of the scheduler's thread grows with the number of tensors.
    """

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    layout_digest: str | None = None
    # see ``vocabulary/layouts.py``; none if the ranks keep the layout
    layout_parts: list[bytes] = []
    # digests of layouts that the ranks need not keep any more
    forgets_layouts: list[str] = []

    @property
    def has_layout(self) -> bool:
        return bool(self.names or self.layout_parts or self.layout_digest is not None)


class TensorSource(LaidOut, tag=True, kw_only=True):
    """Tensors serialized by ``MultiprocessingSerializer``, one payload per rank.

    Replicas may share payloads, and so may the stages of a pipeline. With a layout, each payload is
    one tensor of bytes.
    """

    serialized_named_tensors: list[Payload]
    load_format: str | None = None


class DistributedSource(LaidOut, tag=True, kw_only=True):
    """Tensors in the order in which rank 0 of ``group_name`` broadcasts them."""

    group_name: str
    load_format: str | None = None
    # size limit of a bucket: the tensor that exceeds it is the bucket's last one.
    # None: one bucket for all tensors
    bucket_bytes: int | None = None
    # shapes of the whole tensors, by name, if the trainer of sparse ones gives them
    full_shapes: dict[str, list[int]] = msgspec.field(default_factory=dict)
    # id of this call's broadcasts
    transfer_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class IPCSource(msgspec.Struct, tag=True, kw_only=True):
    """Buffers handed over by a checkpoint-engine process, keyed by device UUID."""

    zmq_handles: dict[str, str]


class GPUMemorySource(msgspec.Struct, tag=True, kw_only=True):
    """Tensors in a trainer's memory on each rank's GPU, opened by CUDA IPC."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    # pickled by the trainer: GPU's UUID -> a handle for each tensor, or one for a shared buffer
    handles: bytes
    # bytes of each tensor in the shared buffer, if the trainer passes them
    sizes: list[int] | None = None
    # the trainer shared one buffer for this call and later ones
    keeps_buffer: bool = False


class PartsSource(msgspec.Struct, tag=True, kw_only=True):
    """The part of each tensor that a rank uses (``plans/parts.py``), by an extension's wire."""

    wire: str
    # the wire's own message
    body: bytes
    # the group by which the parts come, and the id of what comes
    group_name: str
    transfer_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    # "sparse": the changed elements of the parts, by their positions in whole tensors
    load_format: str | None = None


# sources of a checkpoint's tensors, for a model's own loader
LoadedSource = (
    DiskSource
    | SparseFolderSource
    | TensorSource
    | DistributedSource
    | IPCSource
    | GPUMemorySource
    | PartsSource
)
# weights as another server serves them: they come past the model's loader
ServedSource = SavedFolderSource | PeerSource
Source = LoadedSource | ServedSource


def has_custom_loader(source: Source) -> bool:
    """Return whether ``load_format`` names a function (``--custom-weight-loader``)."""
    return isinstance(source, TensorSource) and source.load_format not in (*OF_CHECKPOINT, DIRECT)


def is_sparse(source: Source) -> bool:
    """Return whether the tensors of ``source`` are positions and values of other tensors."""
    if isinstance(source, TensorSource | DistributedSource | PartsSource):
        return source.load_format in SPARSE_FORMATS
    return isinstance(source, SparseFolderSource)


# ---- answers -------------------------------------------------------------------------


class RankAnswer(BaseReq, kw_only=True):
    """One rank's reply to a call. ``AnswerChannel`` fills in the call's id and the rank."""

    call_id: str = ""
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0


class Failed(RankAnswer, kw_only=True):
    """Answer to a call whose handler raised."""

    message: str
    # name of a class in sglang_inflight.vocabulary.errors
    error: str


class Done(RankAnswer, kw_only=True):
    """Success without further fields."""


class Paused(RankAnswer, kw_only=True):
    # None: the call yielded to another pause, and holds none itself
    mode: PauseMode | None
    # counts of requests
    running: int
    waiting: int
    retracted: int
    aborted: int
    # whether a held pause rejects new requests
    rejects: bool = False


class Resumed(RankAnswer, kw_only=True):
    # true if other pauses are still held
    paused: bool
    # the same field as in ``Paused``
    rejects: bool = False


class Opened(RankAnswer, kw_only=True):
    # weights are written in place: requests wait from the first write to the commit
    in_place: bool


class SavedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Another server's version: its save in a folder, or its offer. ``save_id`` tells which."""

    save_id: str
    weight_version: str


class Staged(RankAnswer, kw_only=True):
    staged_s: float
    tensors: int
    bytes: int
    # the version of another server, if its weights came
    saved: SavedVersion | None = None
    # how many of the tensors were quantized, by what came and what it became
    quantized: dict[str, int] = msgspec.field(default_factory=dict)
    # names of tensors that the update has to bring whole
    unpatched: tuple[str, ...] = ()
    # warnings of the update so far
    warnings: tuple[str, ...] = ()
    # digest of the call's tensors as they came, if the call asks for it
    received_digest: str | None = None


class Voted(RankAnswer, kw_only=True):
    """A vote for the update."""

    staged_s: float
    staged_as: StagedChanges
    # digest of all tensors of the update as they came, if all of its calls asked for it
    received_digest: str | None = None
    # a scale of KV that the update changes, with its values, or None
    kv_scale: str | None = None


class Committed(RankAnswer, kw_only=True):
    weight_version: str
    base_version: str
    epoch: int
    # how long the commit held the loop
    stall_ms: float
    # seconds for which requests waited for weights written in place
    held_s: float = 0.0
    # requests sent back to the queue
    retracted: int
    digest: str
    # why the rank serves no requests yet: some released weights are still missing
    hollow: str | None = None


class Changed(RankAnswer, kw_only=True):
    """Common fields of an extension's answers after which a rank may make steps, or none."""

    # whether generation is paused afterwards
    paused: bool
    # the same field as in ``Committed``
    hollow: str | None


class TransferGivenUp(RankAnswer, kw_only=True):
    # the group has lost step with its trainer, and must be formed anew
    broken: bool


class Described(RankAnswer, kw_only=True):
    role: Role = "both"
    capabilities: Capabilities
    pause: PauseStatus
    weights: WeightsStatus
    staging: StagingStatus
    memory: MemoryStatus


A = TypeVar("A", bound=RankAnswer)
M = TypeVar("M", bound=BaseReq)
A_co = TypeVar("A_co", bound=RankAnswer, covariant=True)


# ---- calls ---------------------------------------------------------------------------


class InflightCall(Protocol[A_co]):
    """Common members of all calls: an id, repeated in the answers, and the answers' type."""

    # such a call reads results in flight, or changes what later forwards are made with
    at_boundary: ClassVar[bool]

    call_id: str
    http_worker_ipc: str | None

    @property
    def answer(self) -> type[A_co]: ...

    def drains_pipeline(self) -> bool:
        """Return whether a pipeline handles the call only with no microbatch in flight."""


class TimedCall(InflightCall[A_co], Protocol[A_co]):
    """A call with ``timeout_s`` seconds for each rank's work."""

    timeout_s: float


class Call(BaseReq, kw_only=True):
    at_boundary: ClassVar[bool] = False

    # set on sending
    call_id: str = ""

    def drains_pipeline(self) -> bool:
        return self.at_boundary


class UpdateCall(Call, kw_only=True):
    """A slow call of an update."""

    update_id: str
    # time limit of a rank's work
    timeout_s: float


class PauseCall(PauseGenerationReqInput, kw_only=True):
    """Take or renew a pause. A subclass, so that tools hooked on SGLang's request see it."""

    answer = Paused
    at_boundary: ClassVar[bool] = True

    call_id: str = ""
    # None, allowed only with renews, keeps the mode
    mode: PauseMode | None  # type: ignore[assignment]
    pause_id: str
    # renew a held pause; refused if pause_id is not held
    renews: bool = False
    # renew if pause_id is held, else take it: a caller may repeat a call after a lost answer
    may_be_held: bool = False
    # take no pause if generation is frozen already
    yields: bool = False
    lease_s: float | None = None
    # only for "wait": time limit of running requests
    timeout_s: float | None = None
    # None: "queue", or a renewed pause's own
    new_requests: NewRequests | None = None

    def drains_pipeline(self) -> bool:
        return True


class ContinueCall(ContinueGenerationReqInput, kw_only=True):
    """Release a pause. A subclass of SGLang's request, as ``PauseCall`` is."""

    answer = Resumed
    at_boundary: ClassVar[bool] = True

    call_id: str = ""
    # None releases every pause
    pause_id: str | None = None

    def drains_pipeline(self) -> bool:
        return True


class TimesOver(BaseReq, kw_only=True):
    """Leases and waits expired by the clock of a pipeline's first rank.

    The first rank creates the message, and every stage's ranks handle it in the same turn. SGLang
    distributes a request's time limit in the same way.
    """

    # ids of pauses
    leases: list[str]
    waits: list[str]
    # the sender's count of pause events; a rank with another count ignores the message
    seen: int


class OpenCall(UpdateCall, kw_only=True):
    """Begin to stage an update. Any number of ``StageCall`` follow."""

    answer = Opened

    selector: Selector | None = None
    partial: bool
    expected_version: str | None = None
    # refuse a seal without the tensors of the last update that was opened so
    as_before: bool = False
    # allow a seal without any StageCall: a trainer may write the weights over RDMA
    may_be_empty: bool = False
    # write the live weights, while requests wait; no StageCall before the answer
    in_place: bool = False
    # prove anew what could not be proven for a reason that may have passed
    proves_again: bool = False
    # every StageCall asks for digests: refused if the weights are written in place
    asks_digests: bool = False


class AskedDigests(msgspec.Struct, kw_only=True):
    """A wish for the digests of a call's tensors, as they come."""

    # JSON of the expected ones by name, or None. The staging thread decodes it: a checkpoint may
    # have 100,000 names
    expected: bytes | None = None


class StageCall(UpdateCall, kw_only=True):
    answer = Staged

    source: Source
    selector: Selector | None = None
    digests: AskedDigests | None = None


class SealCall(UpdateCall, kw_only=True):
    """End staging: check the whole update and vote."""

    answer = Voted


class MayRecomputeCall(Call, kw_only=True):
    """Vote, with disaggregation, whether the new weights can recompute all KV."""

    answer = Done


class CommitCall(Call, kw_only=True):
    answer = Committed
    at_boundary: ClassVar[bool] = True

    update_id: str
    weight_version: str | None
    kept_kv: KeptKV
    torch_empty_cache: bool = False
    # the scale in any rank's vote: all ranks must refuse the same rollbacks
    kv_scale: str | None = None

    def drains_pipeline(self) -> bool:
        # to retract requests
        return self.kept_kv.flushes


class DropCall(Call, kw_only=True):
    answer = Done

    update_id: str
    reason: str


class RenameCall(Call, kw_only=True):
    """Rename the served weights' version."""

    answer = Described

    weight_version: str


class RollbackCall(Call, kw_only=True):
    answer = Committed
    at_boundary: ClassVar[bool] = True

    weight_version: str | None
    expected_version: str | None = None
    kept_kv: KeptKV

    def drains_pipeline(self) -> bool:
        # to retract requests
        return self.kept_kv.flushes


class JoinGroupCall(Call, kw_only=True):
    answer = Done

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    rendezvous: MeetBy = "torch"


class LeaveGroupCall(Call, kw_only=True):
    answer = Done

    group_name: str
    # call_id of an abandoned JoinGroupCall: leave only its group, not another of the name
    join_id: str | None = None


class GiveUpTransferCall(Call, kw_only=True):
    """Mark a failed distributed update's group broken if its broadcasts were not received."""

    answer = TransferGivenUp

    group_name: str
    # None if the call was refused before it got an id
    transfer_id: str | None
    reason: str


class StatusCall(Call, kw_only=True):
    answer = Described


class GenerationContinues(BaseReq, kw_only=True):
    """Sent by a replica's first rank when a lease's end changes what the front end mirrors.

    Generation continues after the last lease, or new requests are not rejected any more.
    """


class Pulse(RankAnswer, kw_only=True):
    """Heartbeat of a rank on another node. The first rank does not forward it."""


class RankIsSilent(RankAnswer, kw_only=True):
    """Sent by the first rank when a rank on another node falls silent, or answers again."""

    # seconds of silence; None: the rank answers again
    for_s: float | None


def calls() -> list[type[Call]]:
    """Return the types of all calls, those of imported extensions included."""
    return [*_leaves(Call)]


def answers() -> list[type[RankAnswer]]:
    """Return the types of all ranks' answers to calls, those of imported extensions included."""
    return [each for each in _leaves(RankAnswer) if each not in (Pulse, RankIsSilent)]


def _leaves(base: type[M]) -> Iterator[type[M]]:
    """Yield the classes below ``base`` without a class below them."""
    for each in base.__subclasses__():
        yield from _leaves(each) if each.__subclasses__() else (each,)


def make_known(*others: type[BaseReq]) -> None:
    """Teach SGLang's decoder our messages, and ``others``.

    Runs in every process, before any socket, after the import of the extensions that are on.
    """
    io_struct.hook_custom_types(*calls(), *answers(), RankIsSilent, GenerationContinues, *others)
