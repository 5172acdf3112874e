"""Bodies of the calls: SGLang's fields first, then ours.

Times are seconds. ``frontend/as_sglang.py`` decodes a body, and names a wrong field.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from sglang_inflight.vocabulary.answers import NewRequests, PauseMode, RankOffered
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.kept_kv import KeptKV, KVPolicy, choose_kept_kv
from sglang_inflight.vocabulary.layouts import LayoutDigest

logger = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
NewId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
# short, because every chunk of every answer repeats a version
LONGEST_VERSION = 256
Version = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_VERSION)]
# longest wait of a request, or of a call, for a version
LONGEST_WAIT_S = 86400.0
OnBusy = Literal["wait", "refuse", "replace"]
# commits and rollbacks
Age = Annotated[int, msgspec.Meta(ge=0)]
# KV of requests that move to another adapter; no "keep", because adapters share no prefixes
AdapterKVPolicy = Literal["recompute", "fence"]
# a release either copies the weights to the host or discards them
KeepWeights = Literal["host", "discard"]
Selector = Literal["target", "draft", "all"]

# digest of a tensor, or of many: see ``tensor_digest.py``
DigestText = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]

# what a server's rank asks of whoever wants its weights
OfferToken = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

DEFAULT_GROUP = "weight_update_group"
# a load_format: positions and values of a tensor's changed elements
SPARSE = "sparse"
# a load_format: the weights that another server serves, as it has saved them
SERVED = "served"
# a load_format: tensors concatenated into one tensor of bytes
FLATTENED_BUCKET = "flattened_bucket"
# a load_format: a flattened_bucket of the tensors of ``SPARSE``
SPARSE_BUCKET = "sparse_bucket"

BUCKETS = (FLATTENED_BUCKET, SPARSE_BUCKET)


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    # SGLang's class of this body, in ``sglang.srt.managers.io_struct``; None on our routes
    sglang: ClassVar[str | None] = None


class NoBody(Body, kw_only=True):
    """A call without fields."""


class PauseBody(Body, kw_only=True):
    sglang = "PauseGenerationReqInput"

    # unset: "abort" for a new pause, as in SGLang; a renewed pause keeps its mode
    mode: PauseMode | msgspec.UnsetType = msgspec.UNSET
    pause_id: Name | None = None
    # id of a new pause: the caller can repeat the call after a lost answer
    new_id: NewId | None = None
    lease_s: Seconds | None = None
    timeout_s: Seconds | None = None
    # what becomes of requests that arrive in the pause; None: "queue", or a renewed pause's own
    new_requests: NewRequests | None = None

    def __post_init__(self) -> None:
        check_name("new_id", self.new_id)


class WaitBody(Body, kw_only=True):
    """A wait for an epoch, at least, or for a version's name, or both."""

    epoch: Annotated[int, msgspec.Meta(ge=0)] | None = None
    weight_version: Version | None = None
    # None: the default of a contract
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] | None = None

    def __post_init__(self) -> None:
        check_version(self.weight_version)


class SaveBody(Body, kw_only=True):
    """Write the served weights into the folder ``path``."""

    path: Name
    expected_version: Name | None = None
    # limit of the whole call; None: the setting of updates
    timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        check_folder(self.path)


class DiscardBody(Body, kw_only=True):
    path: Name

    def __post_init__(self) -> None:
        check_folder(self.path)


class OfferBody(Body, kw_only=True):
    """Offer the served weights to other servers, over the network."""

    expected_version: Name | None = None
    # for how long; None: the setting of updates
    timeout_s: Seconds | None = None
    # the address at which each rank listens; None: that of its own machine
    host: Name | None = None

    def __post_init__(self) -> None:
        if self.host is not None:
            check_address("host", self.host)


class WithdrawBody(Body, kw_only=True):
    offer_id: Name


class ExpectBody(Body, kw_only=True):
    """The version that the server's fleet serves. None ends the expectation."""

    weight_version: Version | None = None
    # the first rank's, as in the status; None: the name is enough
    digest: DigestText | None = None
    # refuse the call if the server has committed since this epoch
    epoch: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        check_version(self.weight_version)
        if self.digest is not None and self.weight_version is None:
            raise Refused("digest needs the weight_version that it belongs to")


class DrainBody(Body, kw_only=True):
    """Take no new requests, and end those that still run at a deadline."""

    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 30.0
    # take new requests again
    cancel: bool = False
    # for people who read the status and the log
    reason: Annotated[str, msgspec.Meta(max_length=256)] | None = None

    def __post_init__(self) -> None:
        check_name("reason", self.reason)


class ContinueBody(Body, kw_only=True):
    sglang = "ContinueGenerationReqInput"

    torch_empty_cache: bool = True
    pause_id: Name | None = None


class ReleaseMemoryBody(Body, kw_only=True):
    sglang = "ReleaseMemoryOccupationReqInput"

    # None or an empty list: all kinds of memory, as in SGLang
    tags: list[str] | None = None
    # None: "discard", or "host" with --enable-weights-cpu-backup
    keep_weights: KeepWeights | None = None


class ResumeMemoryBody(Body, kw_only=True):
    sglang = "ResumeMemoryOccupationReqInput"

    tags: list[str] | None = None


class UpdateBody(Body, kw_only=True):
    """Fields of every update call. docs/guide/updates.md explains them."""

    flush_cache: bool = True
    # None, or empty as SGLang allows: unchanged
    weight_version: Annotated[str, msgspec.Meta(max_length=LONGEST_VERSION)] | None = None
    torch_empty_cache: bool = False
    non_blocking: bool = False
    kv_cache: KVPolicy | None = None
    kv_max_age: Age | None = None
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
    # digests of this call's tensors, by name: every tensor needs one, and must come with it
    expected_digests: dict[str, DigestText] | None = None
    # the digest of all tensors of this call together
    expected_digest: DigestText | None = None
    # have the receipt say the digest of all tensors that came
    received_digest: bool = False

    def __post_init__(self) -> None:
        self.weight_version = self.weight_version or None
        check_version(self.weight_version)

    @property
    def sends_pieces(self) -> bool:
        """Default of ``partial``."""
        return True

    @property
    def is_partial(self) -> bool:
        """Whether missing tensors keep their values."""
        return self.sends_pieces if self.partial is None else self.partial

    @property
    def kept_kv(self) -> KeptKV:
        return choose_kept_kv(self.kv_cache, self.kv_max_age, flush_cache=self.flush_cache)


class DiskBody(UpdateBody, kw_only=True):
    sglang = "UpdateWeightFromDiskReqInput"

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
    def sends_pieces(self) -> bool:
        return self.load_format == SPARSE

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


class LaidOutBody(UpdateBody, kw_only=True):
    """Fields of an update of mere bytes: the layout of its tensors, or the layout's digest."""

    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[int]] | None = None
    # beside a layout: the server keeps it. Alone: it stands for the layout that came with it before
    layout_digest: LayoutDigest | None = None
    load_format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        layout = {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}
        missing = [name for name, given in layout.items() if given is None]
        if missing and len(missing) < len(layout):
            raise Refused(f"names, dtypes and shapes belong together: `{missing[0]}` is missing")


class TensorBody(LaidOutBody, kw_only=True):
    sglang = "UpdateWeightsFromTensorReqInput"

    serialized_named_tensors: list[bytes]

    def __post_init__(self) -> None:
        super().__post_init__()
        has_layout = self.names is not None or self.layout_digest is not None
        if has_layout and self.load_format not in BUCKETS:
            raise Refused(
                "names, dtypes, shapes and layout_digest describe the tensors of a bucket: they "
                f"need the load_format {FLATTENED_BUCKET!r}"
            )


class DistributedBody(LaidOutBody, kw_only=True):
    sglang = "UpdateWeightsFromDistributedReqInput"

    group_name: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names is None and self.layout_digest is None:
            raise Refused(
                "bad request body: Object missing required field `names`: a broadcast needs names, "
                "dtypes and shapes, or a layout_digest"
            )


class PartsBody(UpdateBody, kw_only=True):
    sglang = None

    # an extension's name for it, such as "shards"
    wire: str
    group_name: str = DEFAULT_GROUP
    # base64 in JSON
    body: bytes
    # None: whole parts; "sparse": their changed elements
    load_format: Literal["sparse"] | None = None


class PeerBody(UpdateBody, kw_only=True):
    """An update with the weights that another server offers: fields of its ``Offered``."""

    sglang = None

    offer_id: Name
    token: OfferToken
    ranks: Annotated[list[RankOffered], msgspec.Meta(min_length=1)]

    @property
    def sends_pieces(self) -> bool:
        return False


class IPCBody(UpdateBody, kw_only=True):
    sglang = "UpdateWeightsFromIPCReqInput"

    zmq_handles: dict[str, str]


class BeginBody(Body, kw_only=True):
    sglang = "BeginWeightUpdateReqInput"

    # None: the same as in UpdateBody
    selector: Selector | None = "all"
    non_blocking: bool = False
    expected_version: Name | None = None
    # None: the choice of SGLANG_INFLIGHT_SESSIONS
    partial: bool | None = None
    on_busy: OnBusy = "wait"
    lease_s: Seconds | None = None
    # id of the open session: renew its lease, and begin nothing
    session_id: Name | None = None
    # id of a new session: the caller can repeat the call after a lost answer
    new_id: NewId | None = None
    # compute the digest of all tensors of the session
    received_digest: bool = False

    def __post_init__(self) -> None:
        check_name("new_id", self.new_id)


class SealBody(Body, kw_only=True):
    session_id: Name | None = None
    # the digest of all tensors of the session together
    expected_digest: DigestText | None = None


class EndBody(Body, kw_only=True):
    sglang = "EndWeightUpdateReqInput"

    session_id: Name | None = None
    non_blocking: bool = False
    weight_version: Version | None = None
    flush_cache: bool | None = None
    kv_cache: KVPolicy | None = None
    kv_max_age: Age | None = None
    torch_empty_cache: bool = False
    # the field of SealBody
    expected_digest: DigestText | None = None

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
    kv_max_age: Age | None = None

    def __post_init__(self) -> None:
        check_version(self.weight_version)

    @property
    def kept_kv(self) -> KeptKV:
        return choose_kept_kv(self.kv_cache, self.kv_max_age, flush_cache=self.flush_cache)


class NameBody(Body, kw_only=True):
    """Rename the served weights."""

    sglang = "UpdateWeightVersionReqInput"

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
    sglang = "InitWeightsUpdateGroupReqInput"

    group_name: Name = DEFAULT_GROUP
    backend: Name = "nccl"

    def __post_init__(self) -> None:
        check_name("group_name", self.group_name)


class LeaveGroupBody(Body, kw_only=True):
    sglang = "DestroyWeightsUpdateGroupReqInput"

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


def check_address(field: str, address: str) -> None:
    """Raise ``Refused`` unless ``address`` is one of IPv4 or IPv6, in numbers."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise Refused(f"{field} {address[:64]!r} is no IP address") from None


def check_name(field: str, name: str | None) -> None:
    """Raise ``Refused`` if ``name``, new in ``field``, is unprintable for answers and logs."""
    if name is not None and not name.isprintable():
        raise Refused(f"{field} {name[:40]!r} has characters that are not printable")


def check_folder(path: str) -> None:
    """Raise ``Refused`` for a path that depends on the server's own folder."""
    if not path.startswith("/"):
        raise Refused(f"path {path[:200]!r} must be absolute: several ranks and servers use it")


# ---- adapters --------------------------------------------------------------------------


class LoadAdapterBody(Body, kw_only=True):
    """Fields of every load of an adapter."""

    lora_name: Name
    pinned: bool = False
    # ignored: SGLang gives a new id
    lora_id: str | None = None
    # take the name from a loaded adapter
    replace: bool = False
    adapter_version: Version | None = None
    # whether requests of the replaced adapter finish with it or move to the new one
    running: Literal["finish", "move"] = "finish"
    # KV of moved requests
    kv_cache: AdapterKVPolicy | None = None

    def __post_init__(self) -> None:
        check_name("lora_name", self.lora_name)
        check_version(self.adapter_version)
        if self.running == "move" and not self.replace:
            raise Refused('running="move" needs replace=true: a new name has no requests to move')
        if self.kv_cache is not None and self.running != "move":
            raise Refused('kv_cache needs running="move": it is for the KV of moved requests')

    @property
    def kv_policy(self) -> AdapterKVPolicy:
        return self.kv_cache or "recompute"

    @property
    def path(self) -> str | None:
        """Folder of the adapter; None for tensors."""
        return None


class LoadFolderBody(LoadAdapterBody, kw_only=True):
    sglang = "LoadLoRAAdapterReqInput"

    lora_path: Name

    @property
    def path(self) -> str | None:
        return self.lora_path


class LoadTensorsBody(LoadAdapterBody, kw_only=True):
    sglang = "LoadLoRAAdapterFromTensorsReqInput"

    config_dict: dict[str, Any]
    serialized_named_tensors: list[bytes]
    added_tokens_config: dict[str, int] | None = None
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None


class UnloadAdapterBody(Body, kw_only=True):
    sglang = "UnloadLoRAAdapterReqInput"

    lora_name: Name
    # ignored: SGLang looks the id up
    lora_id: str | None = None
    # answer at once: hide the adapter from new requests, unload it after its last request
    non_blocking: bool = False
