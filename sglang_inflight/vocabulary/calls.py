"""Every call of a client, one row each. Imports no SGLang.

The doors derive from these rows: HTTP routes, the refusals of an inactive server, methods of
``Engine``, hooks of ``TokenizerManager``, the client's paths. ``frontend/handlers.py`` carries the
calls out.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.vocabulary.answers import (
    Answer,
    Begun,
    Deferred,
    Drained,
    Expected,
    Grant,
    Inactive,
    MemoryMoved,
    NamelessGrant,
    Offered,
    Receipt,
    Release,
    Saved,
    Served,
    StagedSoFar,
    Status,
    WindowGrant,
    WindowRelease,
    WorkerEntry,
)
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    ContinueBody,
    DiscardBody,
    DiskBody,
    DistributedBody,
    DrainBody,
    EndBody,
    ExpectBody,
    IPCBody,
    JoinGroupBody,
    LeaveGroupBody,
    LoadFolderBody,
    LoadTensorsBody,
    NameBody,
    NoBody,
    OfferBody,
    PartsBody,
    PauseBody,
    PeerBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    RollbackBody,
    SaveBody,
    SealBody,
    TensorBody,
    UnloadAdapterBody,
    WaitBody,
    WithdrawBody,
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. ``body.sglang`` names SGLang's class of its body."""

    # SGLang's method of ``Engine`` and ``TokenizerManager``, or our method of ``Engine``
    name: str
    # docstring of ``Engine``'s method
    doc: str
    # None: only SGLang's own route
    path: str | None
    body: type[Body] = NoBody
    # possible answers; () for success and message, or SGLang's own answer
    answers: tuple[type[Answer], ...] = ()
    # arguments of ``Engine``'s method that have a position; None: ``Engine`` has no such method
    positional: tuple[str, ...] | None = ()
    # SGLang's methods return success and message
    answers_pair: bool = False
    # the route is a GET, and its query has the fields of ``body``
    reads_query: bool = False

    @property
    def is_sglangs(self) -> bool:
        return self.body.sglang is not None or self.path is None

    @property
    def method(self) -> str:
        return "GET" if self.body is NoBody or self.reads_query else "POST"


_ROWS = (
    Call(
        name="pause_generation",
        path="/pause_generation",
        body=PauseBody,
        answers=(Grant, NamelessGrant, WindowGrant),
        positional=("mode",),
        doc="""
        Pause generation, or renew a pause. Return when every rank is paused.

        ``mode`` is "abort" (the default), "in_place", "retract" or "wait". The answer has the
        ``pause_id`` for renewal and release; ``new_id`` chooses it. ``lease_s`` seconds after the
        last renewal generation continues by itself. ``timeout_s`` bounds the wait of the mode
        "wait".

        Raises ``Conflict`` if ``pause_id`` is not held any more.
        """,
    ),
    Call(
        name="continue_generation",
        path="/continue_generation",
        body=ContinueBody,
        answers=(Release, WindowRelease),
        doc="""
        Release the pause ``pause_id``, or all; generation continues when none is left.

        Raises ``Conflict`` if ``pause_id`` is not held any more.
        """,
    ),
    Call(
        name="update_weights_from_disk",
        path="/update_weights_from_disk",
        body=DiskBody,
        answers=(Receipt, StagedSoFar),
        positional=("model_path", "load_format"),
        answers_pair=True,
        doc="""
        Update from a checkpoint's folder: a whole checkpoint, unless ``partial`` is true.

        With ``non_blocking=True`` requests run on meanwhile, and the result is the receipt.
        docs/guide/updates.md has the fields.
        """,
    ),
    Call(
        name="update_weights_from_tensor",
        path="/update_weights_from_tensor",
        body=TensorBody,
        answers=(Receipt, StagedSoFar),
        positional=("named_tensors", "load_format", "flush_cache"),
        answers_pair=True,
        doc="""
        Update from ``(name, tensor)`` pairs, or from one serialized payload per rank.

        Within a session, or with ``non_blocking=True``. docs/guide/updates.md has the fields.
        """,
    ),
    Call(
        name="update_weights_from_distributed",
        path="/update_weights_from_distributed",
        body=DistributedBody,
        answers=(Receipt, StagedSoFar),
        positional=("names", "dtypes", "shapes", "group_name", "flush_cache", "load_format"),
        answers_pair=True,
        doc="""
        Update from broadcasts by rank 0 of ``group_name``.

        Within a session, or with ``non_blocking=True``. docs/guide/updates.md has the fields.
        """,
    ),
    Call(
        name="update_weights_from_ipc",
        path="/update_weights_from_ipc",
        body=IPCBody,
        answers=(Receipt, StagedSoFar),
        positional=("zmq_handles", "flush_cache"),
        answers_pair=True,
        doc="Update from a checkpoint-engine process. docs/guide/updates.md has the fields.",
    ),
    Call(
        name="update_weights_from_parts",
        path="/inflight/update_weights_from_parts",
        body=PartsBody,
        answers=(Receipt, StagedSoFar),
        positional=None,
        doc="Update by the part of each tensor that each rank uses, by an extension's wire.",
    ),
    Call(
        name="update_weights_from_peer",
        path="/inflight/update_weights_from_peer",
        body=PeerBody,
        answers=(Receipt, StagedSoFar),
        positional=("offer_id", "token", "ranks"),
        doc="""
        Update with the weights that another server offers: fields of its ``offer_served_weights``.

        Both servers have the same layout. Raises ``Conflict`` if the other server's ranks cannot be
        reached, fall silent, or serve another version meanwhile.
        """,
    ),
    Call(
        name="begin_weight_update",
        path="/begin_weight_update",
        body=BeginBody,
        answers=(Begun, Deferred),
        positional=("selector",),
        answers_pair=True,
        doc="""
        Open a session: its calls go live together, at ``end_weight_update``.

        With ``non_blocking=True``, return HTTP's answer with the ``session_id``; ``new_id`` chooses
        it. With ``session_id``, renew that session's lease.
        """,
    ),
    Call(
        name="seal_weight_update",
        path="/seal_weight_update",
        body=SealBody,
        answers=(StagedSoFar,),
        doc="Check the session and vote for it on every rank, without committing it.",
    ),
    Call(
        name="end_weight_update",
        path="/end_weight_update",
        body=EndBody,
        answers=(Receipt, Deferred),
        answers_pair=True,
        doc="Commit the session on every rank.",
    ),
    Call(
        name="abort_weight_update",
        path="/abort_weight_update",
        body=AbortUpdateBody,
        doc="Drop the session, and the tensors staged in it.",
    ),
    Call(
        name="init_weights_update_group",
        path="/init_weights_update_group",
        body=JoinGroupBody,
        positional=(
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "group_name",
            "backend",
        ),
        answers_pair=True,
        doc="Join a group with a trainer; this engine's ranks count from ``rank_offset``.",
    ),
    Call(
        name="destroy_weights_update_group",
        path="/destroy_weights_update_group",
        body=LeaveGroupBody,
        positional=("group_name",),
        answers_pair=True,
        doc="Leave the group with a trainer.",
    ),
    Call(
        name="update_weight_version",
        path="/update_weight_version",
        body=NameBody,
        positional=None,
        doc="Rename the served weights.",
    ),
    Call(
        name="release_memory_occupation",
        path="/release_memory_occupation",
        body=ReleaseMemoryBody,
        answers=(MemoryMoved,),
        positional=("tags",),
        doc="""
        Release the memory of ``tags``: kv_cache, weights, cuda_graph.

        ``keep_weights`` is "host" (weights come back unchanged) or "discard" (the trainer must send
        weights again). Raises ``Conflict`` if requests need the memory: pause with "retract" first.
        """,
    ),
    Call(
        name="resume_memory_occupation",
        path="/resume_memory_occupation",
        body=ResumeMemoryBody,
        answers=(MemoryMoved,),
        positional=("tags",),
        doc="""
        Resume the released memory of ``tags``. Raises ``Conflict`` for tags not released.
        """,
    ),
    Call(
        name="load_lora_adapter",
        path="/load_lora_adapter",
        body=LoadFolderBody,
        positional=("lora_name", "lora_path", "pinned"),
        doc="""
        Load an adapter from a folder.

        With ``replace=True`` the adapter may take the name of a loaded one. ``running`` decides
        about the old adapter's requests: they "finish" with it, or "move" to the new one at a step
        boundary. ``kv_cache`` of moved requests is "recompute" (the default) or "fence".
        """,
    ),
    Call(
        name="load_lora_adapter_from_tensors",
        path="/load_lora_adapter_from_tensors",
        body=LoadTensorsBody,
        positional=("lora_name", "tensors", "config_dict", "load_format"),
        doc="""
        Load an adapter from its tensors, by name. Other fields are as in ``load_lora_adapter``.
        """,
    ),
    Call(
        name="unload_lora_adapter",
        path="/unload_lora_adapter",
        body=UnloadAdapterBody,
        positional=("lora_name",),
        doc="Unload an adapter after its last request; with ``non_blocking`` return at once.",
    ),
    Call(
        name="rollback_weights",
        path="/inflight/rollback",
        body=RollbackBody,
        answers=(Receipt,),
        doc="""
        Return to the version before the last commit.

        Raises ``Conflict`` if another version than ``expected_version`` is serving.
        """,
    ),
    Call(
        name="save_served_weights",
        path="/inflight/save",
        body=SaveBody,
        answers=(Saved,),
        positional=("path",),
        doc="""
        Write the served weights into the folder ``path``, while requests run on.

        Another server of the same layout loads them with
        ``update_weights_from_disk(path, load_format="served")``. Raises ``Conflict`` if the served
        version is not ``expected_version``, or changes meanwhile.
        """,
    ),
    Call(
        name="discard_saved_weights",
        path="/inflight/discard",
        body=DiscardBody,
        positional=("path",),
        doc="Delete what ``save_served_weights`` has written into the folder ``path``.",
    ),
    Call(
        name="offer_served_weights",
        path="/inflight/offer",
        body=OfferBody,
        answers=(Offered,),
        doc="""
        Offer the served weights to other servers over the network, while requests run on.

        Another server of the same layout takes them with ``update_weights_from_peer``. Each rank
        listens at ``host``, by default its machine's own address, for ``timeout_s`` seconds. Raises
        ``Conflict`` if the served version is not ``expected_version``.
        """,
    ),
    Call(
        name="withdraw_served_weights",
        path="/inflight/withdraw",
        body=WithdrawBody,
        positional=("offer_id",),
        doc="End an offer of ``offer_served_weights``. A transfer that goes on is given up.",
    ),
    Call(
        name="expect_version",
        path="/inflight/expect",
        body=ExpectBody,
        answers=(Expected,),
        positional=("weight_version",),
        doc="""
        Tell the server which version its fleet serves. None ends the expectation.

        While the server serves another version, or other weights than ``digest``, it is not ready
        and refuses new requests with ``Behind``.
        """,
    ),
    Call(
        name="drain",
        path="/inflight/drain",
        body=DrainBody,
        answers=(Drained,),
        positional=None,
        doc="""
        Take no new requests, and end those that still run after ``deadline_s``.

        Requests that end so have the tokens they have, and ``finish_reason`` ``abort``. ``cancel``
        ends the drain.
        """,
    ),
    Call(
        name="get_weight_version",
        path="/get_weight_version",
        positional=None,
        doc="Return the name of the served weights.",
    ),
    Call(
        name="is_paused",
        path="/is_paused",
        doc="Return whether generation is paused. Raises ``Conflict`` if the replicas differ.",
    ),
    Call(
        name="wait_for_epoch",
        path="/inflight/wait",
        body=WaitBody,
        answers=(Served,),
        positional=("epoch",),
        reads_query=True,
        doc="""
        Return what is served, as soon as the epoch is at least ``epoch``.

        With ``weight_version`` also wait for that name. Raises ``NotServed`` after ``timeout_s``
        seconds; None is the server's SGLANG_INFLIGHT_VERSION_TIMEOUT_S.
        """,
    ),
    Call(
        name="inflight_status",
        path="/inflight/status",
        answers=(Status, Inactive),
        doc="""
        Return the first rank's state, holders, versions and staging; ``ranks`` has each rank's.

        If the engine runs without SGLang Inflight, return ``{"active": False}`` with the reason.
        """,
    ),
    Call(
        name="inflight_worker",
        path="/inflight/worker",
        answers=(WorkerEntry,),
        doc="""
        Return the engine's entry for a gateway's list: what it is, serves and can do.

        The entry has the same size for any number of ranks.
        """,
    ),
    Call(
        name="flush_cache",
        path=None,
        doc="""
        Forget every cached prefix. The answer says whether running requests prevented this.
        """,
    ),
)

TABLE = {call.name: call for call in _ROWS}
