"""Bodies of the calls: SGLang's fields first, then ours.

Bodies of SGLang's routes are read as SGLang reads them. On our routes an unknown field is an
error. Times are seconds. Decoding checks the fields and names a wrong one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)

from sglang_inflight.frontend.as_sglang import as_sglang_reads
from sglang_inflight.messages import (
    DiskSource,
    DistributedSource,
    IPCSource,
    KeepWeights,
    KVPolicy,
    PauseMode,
    Selector,
    Source,
    TensorSource,
)
from sglang_inflight.vocabulary.errors import Refused

logger = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
NewId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
# short, because every chunk of every answer repeats a version
LONGEST_VERSION = 256
Version = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_VERSION)]
OnBusy = Literal["wait", "refuse", "replace"]

DEFAULT_GROUP = "weight_update_group"


B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    # SGLang's type of this body; None on our routes
    sglang: ClassVar[type[msgspec.Struct] | None] = None

    @classmethod
    def our_fields(cls) -> dict[str, Any]:
        """Return the fields missing in SGLang's type, with their defaults."""
        known = cls.sglang.__struct_fields__ if cls.sglang is not None else ()
        return {f.name: f.default for f in msgspec.structs.fields(cls) if f.name not in known}


class PauseBody(Body, kw_only=True):
    sglang = PauseGenerationReqInput

    # unset: "abort" for a new pause, as in SGLang; a renewed pause keeps its mode
    mode: PauseMode | msgspec.UnsetType = msgspec.UNSET
    pause_id: Name | None = None
    # id of a new pause: the caller can repeat the call after a lost answer
    new_id: NewId | None = None
    lease_s: Seconds | None = None
    timeout_s: Seconds | None = None


class ContinueBody(Body, kw_only=True):
    sglang = ContinueGenerationReqInput

    torch_empty_cache: bool = True
    pause_id: Name | None = None


class ReleaseMemoryBody(Body, kw_only=True):
    sglang = ReleaseMemoryOccupationReqInput

    # None or an empty list: all kinds of memory, as in SGLang
    tags: list[str] | None = None
    # None: "discard", or "host" with --enable-weights-cpu-backup
    keep_weights: KeepWeights | None = None


class ResumeMemoryBody(Body, kw_only=True):
    sglang = ResumeMemoryOccupationReqInput

    tags: list[str] | None = None


class UpdateBody(Body, kw_only=True):
    """Fields of every update call. docs/api.md explains them."""

    flush_cache: bool = True
    # None, or empty as SGLang allows: unchanged
    weight_version: Annotated[str, msgspec.Meta(max_length=LONGEST_VERSION)] | None = None
    torch_empty_cache: bool = False
    non_blocking: bool = False
    kv_cache: KVPolicy | None = None
    expected_version: Name | None = None
    partial: bool | None = None
    on_busy: OnBusy = "wait"
    timeout_s: Seconds | None = None
    # None: the target, and the drafts loaded from its checkpoint
    selector: Selector | None = None
    # the session to add this piece to
    session_id: Name | None = None
    # done at the commit, so that a refused update has ended no request
    abort_all_requests: bool = False

    def __post_init__(self) -> None:
        self.weight_version = self.weight_version or None
        check_version(self.weight_version)

    @property
    def source(self) -> Source:
        raise NotImplementedError

    @property
    def sends_pieces(self) -> bool:
        """Default of ``partial``."""
        return True

    @property
    def is_partial(self) -> bool:
        """Whether missing tensors keep their values."""
        return self.sends_pieces if self.partial is None else self.partial

    @property
    def kv_policy(self) -> KVPolicy:
        return choose_kv_policy(self.flush_cache, self.kv_cache)


class DiskBody(UpdateBody, kw_only=True):
    sglang = UpdateWeightFromDiskReqInput

    model_path: Name
    load_format: str | None = None
    # SGLang has these fields and reads none of them
    is_async: bool = False
    keep_pause: bool = False
    token_step: int = 0
    # without effect: captured graphs hold addresses, and a commit keeps every weight's address
    recapture_cuda_graph: bool = False
    manifest: dict[str, Any] | None = None

    @property
    def source(self) -> Source:
        return DiskSource(model_path=self.model_path, load_format=self.load_format)

    @property
    def sends_pieces(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recapture_cuda_graph:
            _warn_that_graphs_stay()


@functools.cache
def _warn_that_graphs_stay() -> None:
    """Log this once per process."""
    logger.warning(
        "recapture_cuda_graph is ignored: a commit keeps every weight's address, so captured "
        "CUDA graphs stay valid."
    )


class TensorBody(UpdateBody, kw_only=True):
    sglang = UpdateWeightsFromTensorReqInput

    serialized_named_tensors: list[bytes]
    load_format: str | None = None

    @property
    def source(self) -> Source:
        return TensorSource(
            serialized_named_tensors=[*self.serialized_named_tensors],
            load_format=self.load_format,
        )


class DistributedBody(UpdateBody, kw_only=True):
    sglang = UpdateWeightsFromDistributedReqInput

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP
    load_format: str | None = None

    @property
    def source(self) -> DistributedSource:
        return DistributedSource(
            names=self.names,
            dtypes=self.dtypes,
            shapes=self.shapes,
            group_name=self.group_name,
            load_format=self.load_format,
        )


class IPCBody(UpdateBody, kw_only=True):
    sglang = UpdateWeightsFromIPCReqInput

    zmq_handles: dict[str, str]

    @property
    def source(self) -> Source:
        return IPCSource(zmq_handles=self.zmq_handles)


class BeginBody(Body, kw_only=True):
    sglang = BeginWeightUpdateReqInput

    # None: as in UpdateBody
    selector: Selector | None = "all"
    non_blocking: bool = False
    expected_version: Name | None = None
    partial: bool = True
    on_busy: OnBusy = "wait"
    lease_s: Seconds | None = None
    # id of the open session: renew its lease, and begin nothing
    session_id: Name | None = None
    # id of a new session: the caller can repeat the call after a lost answer
    new_id: NewId | None = None


class SealBody(Body, kw_only=True):
    session_id: Name | None = None


class EndBody(Body, kw_only=True):
    sglang = EndWeightUpdateReqInput

    session_id: Name | None = None
    non_blocking: bool = False
    weight_version: Version | None = None
    flush_cache: bool | None = None
    kv_cache: KVPolicy | None = None
    torch_empty_cache: bool = False

    def __post_init__(self) -> None:
        check_version(self.weight_version)


class AbortUpdateBody(Body, kw_only=True):
    session_id: Name | None = None


class RollbackBody(Body, kw_only=True):
    weight_version: Version | None = None
    # refused if another version is serving
    expected_version: Name | None = None
    flush_cache: bool = False
    kv_cache: KVPolicy | None = None

    def __post_init__(self) -> None:
        check_version(self.weight_version)

    @property
    def kv_policy(self) -> KVPolicy:
        return choose_kv_policy(self.flush_cache, self.kv_cache)


class NameBody(Body, kw_only=True):
    """Rename the served weights."""

    sglang = UpdateWeightVersionReqInput

    new_version: Version
    abort_all_requests: bool = True

    def __post_init__(self) -> None:
        check_version(self.new_version)


class Rendezvous(Body, kw_only=True):
    """Address and rank numbers of a group of ranks and trainer."""

    master_address: Name
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=0)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]


class JoinGroupBody(Rendezvous, kw_only=True):
    sglang = InitWeightsUpdateGroupReqInput

    group_name: Name = DEFAULT_GROUP
    backend: Name = "nccl"


class LeaveGroupBody(Body, kw_only=True):
    sglang = DestroyWeightsUpdateGroupReqInput

    group_name: Name = DEFAULT_GROUP


def check_version(name: str | None) -> None:
    """Raise ``Refused`` if ``name`` is too long or unprintable for answers and logs."""
    if name is None:
        return
    if not (0 < len(name) <= LONGEST_VERSION and name.isprintable()):
        raise Refused(
            f"a weight version has 1 to {LONGEST_VERSION} printable characters; "
            f"{name[:40]!r} has {len(name)}"
            + ("" if name.isprintable() else ", some of them not printable")
        )


def choose_kv_policy(flush_cache: bool, kv_cache: KVPolicy | None) -> KVPolicy:
    """Return what happens to KV of older weights; ``kv_cache`` overrides ``flush_cache``."""
    if kv_cache is not None:
        return kv_cache
    return "recompute" if flush_cache else "fence"


def decode(body: bytes, shape: type[B]) -> B:
    """Decode JSON into a ``shape``; raise ``Refused`` with the wrong field's name."""
    content = body or b"{}"
    try:
        try:
            return msgspec.json.decode(content, type=shape)
        except msgspec.ValidationError:
            values = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f"bad request body: {error}") from error
    return convert(values, shape, "request body")


def read_query(items: Iterable[tuple[str, str]], shape: type[B]) -> B:
    """Convert a query into a ``shape``; raise ``Refused`` with the wrong parameter's name."""
    values: dict[str, str] = {}
    for name, text in items:
        if name in values:
            raise Refused(f"bad query: {name} is given twice")
        values[name] = text
    return convert(values, shape, "query", strict=False)


def convert(values: object, shape: type[B], name: str, *, strict: bool = True) -> B:
    """Convert ``values`` into a ``shape``; raise ``Refused`` with the wrong field's name."""
    if shape.sglang is not None and isinstance(values, dict):
        values = as_sglang_reads(values, shape.sglang, shape.__struct_fields__)
    try:
        return msgspec.convert(values, shape, strict=strict)
    except msgspec.ValidationError as error:
        raise Refused(f"bad {name}: {error}") from error


class _NamesAGroup(msgspec.Struct):
    group_name: str = DEFAULT_GROUP


def group_named_in(body: bytes) -> str:
    """Return the group name in a distributed update's body, even of a refused body."""
    try:
        return msgspec.json.decode(body, type=_NamesAGroup).group_name
    except (msgspec.DecodeError, RecursionError):
        return DEFAULT_GROUP
