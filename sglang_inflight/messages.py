"""Every message of ours that crosses a process.

The front end sends a ``…Call`` to the schedulers on SGLang's own request socket; SGLang
hands it to every rank of a replica in the same pass of the loop. Each rank answers on a
socket of its own, so a failure on any rank is seen: with the type that the call names as its
``answer``, or with ``Failed``.

Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
from sglang.srt.managers import io_struct

from sglang_inflight.status import MemoryStatus, PauseStatus, Role, StagingStatus, WeightsStatus
from sglang_inflight.status import PauseMode as PauseMode

if TYPE_CHECKING:

    class BaseReq(msgspec.Struct, kw_only=True):
        rid: str | None = None
        http_worker_ipc: str | None = None

    class PauseGenerationReqInput(BaseReq, kw_only=True):
        pass

    class ContinueGenerationReqInput(BaseReq, kw_only=True):
        torch_empty_cache: bool = True

    class LoadLoRAAdapterReqInput(BaseReq, kw_only=True):
        lora_name: str
        lora_path: str
        pinned: bool = False
        lora_id: str | None = None

    class LoadLoRAAdapterFromTensorsReqInput(BaseReq, kw_only=True):
        lora_name: str
        config_dict: dict[str, Any]
        serialized_named_tensors: list[bytes]
        pinned: bool = False
        added_tokens_config: dict[str, int] | None = None
        lora_id: str | None = None
        load_format: str | None = None
        expected_checksums: dict[str, str] | None = None

else:
    from sglang.srt.managers.io_struct import (
        BaseReq,
        ContinueGenerationReqInput,
        LoadLoRAAdapterFromTensorsReqInput,
        LoadLoRAAdapterReqInput,
        PauseGenerationReqInput,
    )

# of a rank's answer to an unloading, after how many there are
ADAPTER_IN_USE = "requests of it have not ended"

KVPolicy = Literal["recompute", "fence", "keep"]
# of requests that go on with another adapter: prefixes of one are never another's
AdapterKVPolicy = Literal["recompute", "fence"]
# what becomes of weights whose memory is released
KeepWeights = Literal["host", "discard"]
Selector = Literal["target", "draft", "all"]
# how a trainer is met: through torch.distributed, or by vLLM's StatelessProcessGroup
MeetBy = Literal["torch", "stateless"]

# what a request's answer, and a request's custom_params, call these
KV_VERSIONS = "kv_versions"
ADAPTER_VERSIONS = "adapter_versions"
MAX_VERSION_LAG = "max_version_lag"

# how the ids of SGLang's own control calls begin, which every rank is to answer
CONTROL_CALL = "inflight-control-"

# of tensors that are not sent
NEEDS_ONE_GPU = (
    "Tensors by CUDA IPC need a trainer and a server on one machine, each of whose ranks has its "
    "GPU in common with a rank of the trainer"
)

# a load_format: tensors one after the other in one tensor of bytes
FLATTENED_BUCKET = "flattened_bucket"
# a load_format: parameters of this rank, by their own names
DIRECT = "direct"


class DiskSource(msgspec.Struct, tag=True, kw_only=True):
    """A checkpoint in a directory that every rank can read."""

    model_path: str
    load_format: str | None = None


class PayloadFile(msgspec.Struct, tag=True, kw_only=True):
    """A payload too large for a message: a file of the front end's that has no name."""

    # under /proc, for as long as the call is not answered
    path: str


Payload = bytes | PayloadFile


class TensorSource(msgspec.Struct, tag=True, kw_only=True):
    """Tensors serialized by ``MultiprocessingSerializer``, one payload per rank.

    Replicas, and stages of a pipeline, may share them.
    """

    serialized_named_tensors: list[Payload]
    load_format: str | None = None

    @property
    def has_custom_loader(self) -> bool:
        """Whether ``load_format`` names a function (``--custom-weight-loader``)."""
        return self.load_format not in (None, FLATTENED_BUCKET, DIRECT)


class DistributedSource(msgspec.Struct, tag=True, kw_only=True):
    """Tensors that rank 0 of ``group_name`` broadcasts, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str | None = None
    # with a bucket as load_format: the tensor that takes a bucket beyond this size ends it,
    # and another one follows; None: one bucket for all
    bucket_bytes: int | None = None
    # of the broadcasts that belong to this call, and to no other
    transfer_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class IPCSource(msgspec.Struct, tag=True, kw_only=True):
    """Buffers that a checkpoint-engine process hands over, keyed by device UUID."""

    zmq_handles: dict[str, str]


class GPUMemorySource(msgspec.Struct, tag=True, kw_only=True):
    """Tensors in a trainer's memory on each rank's GPU, which CUDA IPC opens to the rank."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    # pickled by the trainer, by the UUID of a GPU: for each tensor, or for one buffer of all
    handles: bytes
    # of each tensor in the buffer, in bytes, where the trainer says them
    sizes: list[int] | None = None
    # whether the trainer shared its buffer once, for this call and others
    keeps_buffer: bool = False


Source = DiskSource | TensorSource | DistributedSource | IPCSource | GPUMemorySource


# ---- answers -------------------------------------------------------------------------


class RankAnswer(BaseReq, kw_only=True):
    """What one rank says to a call. Whom it is for, and whose it is, is set when it is sent."""

    call_id: str = ""
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0


class Failed(RankAnswer, kw_only=True):
    """The answer to any call that raised."""

    message: str
    # name of the error's class in sglang_inflight.errors
    error: str


class Done(RankAnswer, kw_only=True):
    """There is no more to say."""


class Paused(RankAnswer, kw_only=True):
    # None where generation stands still for others, and this pause took nothing
    mode: PauseMode | None
    # requests
    running: int
    waiting: int
    retracted: int
    aborted: int


class Resumed(RankAnswer, kw_only=True):
    # others still hold a pause
    paused: bool


class Opened(RankAnswer, kw_only=True):
    # it is written in place: from the first write on requests wait for the commit
    in_place: bool


class Staged(RankAnswer, kw_only=True):
    staged_s: float
    tensors: int
    bytes: int


class Voted(RankAnswer, kw_only=True):
    """A vote for the update."""

    staged_s: float


class Committed(RankAnswer, kw_only=True):
    weight_version: str
    base_version: str
    epoch: int
    # how long the loop was held
    stall_ms: float
    # requests that went back to the queue
    retracted: int
    digest: str
    # why they are not served yet: parts of hollow weights are still to be sent
    hollow: str | None = None


class Moved(RankAnswer, kw_only=True):
    """Memory was given back, or is here again."""

    # by kind of memory, and what its shadow had
    bytes: dict[str, int]
    seconds: float
    # whether generation stands still after it
    paused: bool
    hollow: str | None


class RequestsMoved(RankAnswer, kw_only=True):
    # of the requests that go on with the other adapter
    rids: list[str]
    # requests that went back to the queue
    retracted: int


class TransferGivenUp(RankAnswer, kw_only=True):
    # the group is out of step with its trainer now
    broken: bool


class Described(RankAnswer, kw_only=True):
    role: Role = "both"
    pause: PauseStatus
    weights: WeightsStatus
    staging: StagingStatus
    memory: MemoryStatus


ANSWERS: tuple[type[RankAnswer], ...] = (
    Failed,
    Done,
    Paused,
    Resumed,
    Opened,
    Staged,
    Voted,
    Committed,
    Moved,
    RequestsMoved,
    TransferGivenUp,
    Described,
)

A = TypeVar("A", bound=RankAnswer)
A_co = TypeVar("A_co", bound=RankAnswer, covariant=True)


# ---- calls ---------------------------------------------------------------------------


class InflightCall(Protocol[A_co]):
    """What every call has: the id that its answers name, and the type that they have."""

    call_id: str
    http_worker_ipc: str | None

    @property
    def answer(self) -> type[A_co]: ...


class TimedCall(InflightCall[A_co], Protocol[A_co]):
    """A call that may take ``timeout_s`` seconds on a rank."""

    timeout_s: float


class Call(BaseReq, kw_only=True):
    # set when it is sent
    call_id: str = ""


class UpdateCall(Call, kw_only=True):
    """A call of an update that takes its time."""

    update_id: str
    # how long a rank may take for it
    timeout_s: float


class PauseCall(PauseGenerationReqInput, kw_only=True):
    """One of SGLang's own kind, so that tools which look for that on its way see it."""

    answer = Paused

    call_id: str = ""
    # None only to renew: keep the mode
    mode: PauseMode | None
    pause_id: str
    # renew a pause that is held, rather than take one
    renews: bool = False
    # renew it only where it is held: the answer of the call that took it may have been lost
    may_be_held: bool = False
    # take none where generation stands still already
    yields: bool = False
    lease_s: float | None = None
    # only for "wait": how long running requests may take
    timeout_s: float | None = None


class ContinueCall(ContinueGenerationReqInput, kw_only=True):
    """One of SGLang's own kind, for the same reason."""

    answer = Resumed

    call_id: str = ""
    # None lets go of every pause
    pause_id: str | None = None


class TimesOver(BaseReq, kw_only=True):
    """What has run out by the clock of a pipeline's first rank, which every stage goes by.

    It travels as a request's time limit does: made at the first rank, taken in by every rank of
    every stage in turns of the same number.
    """

    # ids of pauses
    leases: list[str]
    waits: list[str]
    # how many events a rank's pauses had seen when it was made; it is void after one more
    seen: int


class OpenCall(UpdateCall, kw_only=True):
    """Begin to stage an update, which many ``StageCall`` may fill."""

    answer = Opened

    selector: Selector | None = None
    partial: bool
    expected_version: str | None = None
    # something else may write the weights until the seal, as a trainer does over RDMA
    may_be_empty: bool = False


class StageCall(UpdateCall, kw_only=True):
    answer = Staged

    source: Source
    selector: Selector | None = None


class SealCall(UpdateCall, kw_only=True):
    """Nothing more will be staged: check the whole and vote."""

    answer = Voted


class MayRecomputeCall(Call, kw_only=True):
    """A vote on the KV, between two servers: can all of it be made anew by the new weights?"""

    answer = Done


class CommitCall(Call, kw_only=True):
    answer = Committed

    update_id: str
    weight_version: str | None
    kv_cache: KVPolicy
    torch_empty_cache: bool = False


class DropCall(Call, kw_only=True):
    answer = Done

    update_id: str
    reason: str


class RenameCall(Call, kw_only=True):
    """Another name for the weights that are in place."""

    answer = Described

    weight_version: str


class RollbackCall(Call, kw_only=True):
    answer = Committed

    weight_version: str | None
    expected_version: str | None = None
    kv_cache: KVPolicy


class PrepareReleaseCall(Call, kw_only=True):
    """Phase one of a release: may it be, and copy what is to be kept.

    The rank makes no step from its vote on, until the memory is back or
    ``CancelReleaseCall`` comes.
    """

    answer = Done

    tags: list[str]
    # None: as the server was started
    keep_weights: KeepWeights | None


class ReleaseCall(Call, kw_only=True):
    """Phase two: give back what all ranks have voted for."""

    answer = Moved


class CancelReleaseCall(Call, kw_only=True):
    """Instead of phase two: not all have voted for it."""

    answer = Done


class PrepareResumeCall(Call, kw_only=True):
    """Phase one of the return: was it released, and is there room for it?"""

    answer = Done

    tags: list[str]


class ResumeCall(Call, kw_only=True):
    """Phase two of the return. Generation goes on when all is back."""

    answer = Moved

    tags: list[str]
    # go on holding requests back, rather than end them, while weights are hollow
    until_filled: bool = False


class FlushCall(Call, kw_only=True):
    """Forget every cached prefix."""

    answer = Done

    # send running requests, which hold KV, back to the queue; False refuses where there are any
    retract: bool


class ForgetEmbeddingsCall(Call, kw_only=True):
    answer = Done


class NameAdaptersCall(Call, kw_only=True):
    """A name passes from one adapter to another, which ranks know by their ids."""

    answer = Done

    # by the id of the adapter
    names: dict[str, str]


class MoveRequestsCall(Call, kw_only=True):
    """Requests of one adapter go on with another, from this step boundary on."""

    answer = RequestsMoved

    from_id: str
    to_id: str
    kv_cache: AdapterKVPolicy


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
    # of the JoinGroupCall that is given up: leave what it forms or has formed, and no other
    # group of the name
    join_id: str | None = None


class GiveUpTransferCall(Call, kw_only=True):
    """A distributed update failed: break its group where its broadcasts were not taken in."""

    answer = TransferGivenUp

    group_name: str
    # None where the call was refused before it had one
    transfer_id: str | None
    reason: str


class StatusCall(Call, kw_only=True):
    answer = Described


class LoadAdapter(LoadLoRAAdapterReqInput, kw_only=True):
    """SGLang's own, which its handlers take and answer.

    ``adapter`` is what requests call it. ``lora_name`` may be another name, which ranks know it
    by until it takes the place of the one that has the name.
    """

    adapter: str
    adapter_version: str


class LoadAdapterFromTensors(LoadLoRAAdapterFromTensorsReqInput, kw_only=True):
    """The same."""

    adapter: str
    adapter_version: str


class GenerationContinues(BaseReq, kw_only=True):
    """The first rank of a replica says that nobody asked for it: the last lease ran out."""


class Pulse(RankAnswer, kw_only=True):
    """A rank of another node is there. Goes no further than the first rank."""


class RankIsSilent(RankAnswer, kw_only=True):
    """The first rank says so of a rank on another node; or that it is heard of again."""

    # seconds; None: it is heard of again
    for_s: float | None


CALLS: tuple[type[InflightCall[Any]], ...] = (
    PauseCall,
    ContinueCall,
    OpenCall,
    StageCall,
    SealCall,
    MayRecomputeCall,
    CommitCall,
    DropCall,
    RenameCall,
    RollbackCall,
    PrepareReleaseCall,
    ReleaseCall,
    CancelReleaseCall,
    PrepareResumeCall,
    ResumeCall,
    FlushCall,
    ForgetEmbeddingsCall,
    NameAdaptersCall,
    MoveRequestsCall,
    JoinGroupCall,
    LeaveGroupCall,
    GiveUpTransferCall,
    StatusCall,
)


def make_known() -> None:
    """Teach SGLang's decoder our messages. Runs in every process, before any socket."""
    io_struct.hook_custom_types(
        *CALLS, *ANSWERS, RankIsSilent, GenerationContinues, LoadAdapter, LoadAdapterFromTensors
    )
