"""Bodies of vLLM's routes, with vLLM's fields."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from sglang_inflight.frontend.updates.wanted import read_distributed, source_of
from sglang_inflight.messages import DistributedSource, GPUMemorySource, MeetBy, PauseMode
from sglang_inflight.vocabulary.bodies import (
    Body,
    DistributedBody,
    Name,
    NameBody,
    Rendezvous,
    Version,
    check_version,
)
from sglang_inflight.vocabulary.bodies import UpdateBody as SGLangsUpdate
from sglang_inflight.vocabulary.errors import NotOffered, Refused

VLLMPauseMode = Literal["abort", "wait", "keep"]
Positive = Annotated[int, msgspec.Meta(ge=1)]

# vLLM's default
PACKED_BYTES = 1 << 30


class PauseQuery(Body, kw_only=True):
    mode: VLLMPauseMode = "abort"
    clear_cache: bool = True


class SleepQuery(Body, kw_only=True):
    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    mode: VLLMPauseMode = "abort"


class ResetCacheQuery(Body, kw_only=True):
    reset_running_requests: bool = False
    reset_external: bool = False


class ResetCacheBody(Body, kw_only=True, forbid_unknown_fields=False):
    reset_running_requests: bool = False


class WorldSizeQuery(Body, kw_only=True):
    include_dp: bool = True


class AbortBody(Body, kw_only=True):
    request_ids: list[Name] | None = None


class InitBody(Body, kw_only=True):
    init_info: dict[str, Any]


class InitInfo(Rendezvous, kw_only=True):
    """``init_info`` of vLLM's ``nccl`` backend."""

    # whether tensors come in buckets, and the bucket size in bytes
    packed: bool = False
    packed_buffer_size_bytes: Positive = PACKED_BYTES
    # ignored: buckets in flight at vLLM's receiver; ours has one
    packed_num_buffers: Positive = 2
    # ours, for trainers on torch.distributed; vLLM's clients leave it out
    rendezvous: MeetBy = "stateless"


class InitHandles(Body, kw_only=True):
    """``init_info`` of vLLM's ``ipc`` backend, without a group to join."""

    # ignored: whether handles point to one buffer of many tensors; the handles tell
    packed: bool = False


class StartBody(Body, kw_only=True):
    is_checkpoint_format: bool = True

    def __post_init__(self) -> None:
        if not self.is_checkpoint_format:
            raise NotOffered(
                "is_checkpoint_format=false is not offered: send weights as a checkpoint has them"
            )


class UpdateBody(Body, kw_only=True):
    update_info: dict[str, Any] | list[dict[str, Any]]


class UpdateInfo(Body, kw_only=True):
    """``update_info`` of vLLM's ``nccl`` backend."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    # SkyRL sends it with each update, vLLM 0.32 only in init_info; None: as in init_info
    packed: bool | None = None
    packed_buffer_size_bytes: Positive | None = None
    packed_num_buffers: Positive | None = None
    # a field of start_weight_update; TRL sends it here, too
    is_checkpoint_format: bool = True
    # vLLM's sparse_nccl backend sends it: the number of elements that come of each tensor
    num_updates_list: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None

    def __post_init__(self) -> None:
        StartBody(is_checkpoint_format=self.is_checkpoint_format)
        if self.num_updates_list is None:
            return
        if self.packed:
            raise Refused("num_updates_list is for tensors that are not packed")
        counts = self.names, self.dtype_names, self.shapes, self.num_updates_list
        if len({len(each) for each in counts}) > 1:
            raise Refused(
                "names, dtype_names, shapes and num_updates_list must be of one length, not "
                + ", ".join(str(len(each)) for each in counts)
            )


class HandlesInfo(Body, kw_only=True):
    """``update_info`` of vLLM's ``ipc`` backend."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles_pickled: bytes
    # sizes of tensors in a buffer: vLLM's in bytes, SkyRL's (``sizes``) in elements
    tensor_sizes: list[int] | None = None
    sizes: list[int] | None = None
    # null from vLLM's client beside ipc_handles_pickled
    ipc_handles: None = None
    packed: bool | None = None
    is_checkpoint_format: bool = True

    def __post_init__(self) -> None:
        StartBody(is_checkpoint_format=self.is_checkpoint_format)
        if self.sizes is not None and self.sizes != [math.prod(shape) for shape in self.shapes]:
            raise Refused("sizes do not match shapes: give each tensor's number of elements")


class WeightDirBody(Body, kw_only=True, forbid_unknown_fields=False):
    """prime-rl's ``/update_weights`` with weights in files."""

    weight_dir: Name | None


class FinishBody(Body, kw_only=True):
    weight_version: Version | None = None

    def __post_init__(self) -> None:
        check_version(self.weight_version)


class VersionBody(NameBody, kw_only=True):
    # a new name aborts no requests in vLLM
    abort_all_requests: bool = False


class CheckBody(Body, kw_only=True):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class BroadcastBody(DistributedBody, kw_only=True):
    """A distributed update in buckets of a given size, or of sparse tensors."""

    bucket_bytes: int | None = None
    # shapes of the whole tensors, by name
    full_shapes: dict[str, list[int]] = msgspec.field(default_factory=dict)


@source_of.register
def _(body: BroadcastBody) -> DistributedSource:
    source = read_distributed(body)
    return msgspec.structs.replace(
        source, bucket_bytes=body.bucket_bytes, full_shapes=body.full_shapes
    )


class HandlesBody(SGLangsUpdate, kw_only=True):
    """An update by handles to the trainer's memory."""

    info: HandlesInfo


@source_of.register
def _(body: HandlesBody) -> GPUMemorySource:
    info = body.info
    return GPUMemorySource(
        names=info.names,
        dtypes=info.dtype_names,
        shapes=info.shapes,
        handles=info.ipc_handles_pickled,
        sizes=info.tensor_sizes,
        # SkyRL shares a new buffer for each call, vLLM one buffer for a whole update
        keeps_buffer=info.tensor_sizes is not None,
    )


def choose_pause_mode(mode: VLLMPauseMode, *, clears_cache: bool) -> PauseMode:
    """Return our mode. Unlike its docs, vLLM preempts kept requests when it clears the cache."""
    if mode == "keep":
        return "retract" if clears_cache else "in_place"
    return mode
