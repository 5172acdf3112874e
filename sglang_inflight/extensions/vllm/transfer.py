"""vLLM's weight transfer engine: update sessions from one joined trainer."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from sglang_inflight.extensions.vllm.bodies import (
    PACKED_BYTES,
    BroadcastBody,
    HandlesBody,
    HandlesInfo,
    InitHandles,
    InitInfo,
    UpdateBody,
    UpdateInfo,
)
from sglang_inflight.frontend.as_sglang import convert, decode
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.messages import FLATTENED_BUCKET, NEEDS_ONE_GPU, SPARSE, Selector
from sglang_inflight.vocabulary.bodies import (
    DEFAULT_GROUP,
    AbortUpdateBody,
    BeginBody,
    EndBody,
    JoinGroupBody,
    LeaveGroupBody,
)
from sglang_inflight.vocabulary.errors import Conflict, NotOffered, Refused

# how vLLM's clients end a session
ENDS_IT = (
    "finish_weight_update commits it; if its trainer is gone, init_weight_transfer_engine or "
    "abort_weight_update drops it"
)


@dataclass(frozen=True)
class _Link:
    """The joined trainer's way of sending weights."""

    # true: broadcasts in a group; false: handles to its memory, without a group
    is_group: bool
    # bucket size of broadcasts; None: one broadcast per tensor
    bucket_bytes: int | None = None


class Transfer:
    """Join a trainer and receive its weights, as vLLM's ``nccl`` and ``ipc`` backends do.

    vLLM has one trainer at a time, and no group names: the group is the default one of
    ``/init_weights_update_group``. Lives on the front end's event loop.
    """

    def __init__(
        self,
        groups: Groups,
        updates: Updates,
        *,
        backend: str,
        on_cuda: bool,
        session_lease_s: float,
    ) -> None:
        self._groups = groups
        self._updates = updates
        self._backend = backend
        self._on_cuda = on_cuda
        # vLLM has no call to drop a session, so an abandoned session must end by itself
        self._session_lease_s = session_lease_s
        self._link: _Link | None = None
        # id of the last session begun; vLLM's calls carry no id
        self._session_id: str | None = None

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Leave the previous trainer, if any, and join this one.

        Drop the previous trainer's open session: its remaining pieces will not come. vLLM fixes
        the backend at its start; here ``init_info`` selects the backend. Raises ``NotOffered`` for
        vLLM's other backends, ``Refused`` if the group was not formed or memory cannot be shared.
        """
        if "nccl_unique_id_b64" in init_info:
            raise NotOffered(
                "nccl_unique_id_b64 is not offered: pass master_address and master_port"
            )
        if init_info.keys() <= {*InitHandles.__struct_fields__}:
            await self._share_memory(convert(init_info, InitHandles, "init_info"))
        else:
            await self._join(convert(init_info, InitInfo, "init_info"))

    async def _share_memory(self, _: InitHandles) -> None:
        if not self._on_cuda:
            raise Refused(
                f"init_info has no master_address, as for vLLM's ipc backend. {NEEDS_ONE_GPU}"
            )
        await self._part()
        self._link = _Link(is_group=False)

    async def _join(self, info: InitInfo) -> None:
        await self._part()
        await self._groups.join(
            JoinGroupBody(
                master_address=info.master_address,
                master_port=info.master_port,
                rank_offset=info.rank_offset,
                world_size=info.world_size,
                backend=self._backend,
            ),
            info.rendezvous,
        )
        bucket_bytes = info.packed_buffer_size_bytes if info.packed else None
        self._link = _Link(is_group=True, bucket_bytes=bucket_bytes)

    async def _part(self) -> None:
        """Drop the previous trainer's session, and leave its group."""
        if self._updates.has_session:
            await self._updates.abort(AbortUpdateBody())
        await self._leave()

    async def disconnect(self) -> None:
        """Leave the group, if there is one. Raises ``Conflict`` in a session."""
        self.require_no_session()
        await self._leave()

    def require_no_session(self) -> None:
        """Raise ``Conflict`` if a session is open."""
        if self._updates.has_session:
            raise Conflict(f"a weight update is going on: {ENDS_IT}")

    async def start(self, selector: Selector) -> None:
        self._require_link()
        if self._updates.has_session:
            raise Refused(f"a weight update is already open: {ENDS_IT}")
        begun = await self._updates.begin(
            BeginBody(selector=selector, non_blocking=True, lease_s=self._session_lease_s)
        )
        self._session_id = begun.session_id

    async def receive(self, content: bytes) -> None:
        """Stage a piece from the trainer; the session goes live at ``finish``.

        ``content`` is the undecoded body, because an unreadable body must drop the session, like
        every refused piece.
        """
        link = self._require_link()
        async with self._in_step(link):
            try:
                session_id = self._require_session("call start_weight_update first")
                body = _read(link, decode(content, UpdateBody).update_info, session_id)
            except Refused:
                if self._updates.has_session:
                    await self._updates.abort(AbortUpdateBody())
                raise
        await self._updates.update(body)

    async def lose(self) -> None:
        """Drop the session after an incomplete body: its trainer may still call ``finish``."""
        if self._updates.has_session and self._session_id is not None:
            with suppress(Refused):
                await self._updates.abort(AbortUpdateBody(session_id=self._session_id))

    async def finish(self, weight_version: str | None) -> None:
        """Commit the session. Running requests keep their KV, as in vLLM, and so do salts."""
        session_id = self._require_session("there is nothing to finish")
        await self._updates.end(
            EndBody(
                session_id=session_id,
                non_blocking=True,
                weight_version=weight_version,
                **self._updates.policy_or("by_salt"),
            )
        )

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None and link.is_group:
            await self._groups.leave(LeaveGroupBody())

    def _in_step(self, link: _Link) -> AbstractAsyncContextManager[None]:
        """Mark the group broken if the block raises: its trainer may be broadcasting already."""
        return self._groups.in_step_by_name(DEFAULT_GROUP) if link.is_group else nullcontext()

    def _require_link(self) -> _Link:
        if self._link is None:
            raise Refused("no trainer is joined: call init_weight_transfer_engine first")
        return self._link

    def _require_session(self, otherwise: str) -> str:
        if not self._updates.has_session or self._session_id is None:
            raise Refused(
                f"no weight update is going on: {otherwise} (a failed call ends it, and so does "
                "its lease)"
            )
        return self._session_id


def _read(
    link: _Link, update_info: dict[str, Any] | list[dict[str, Any]], session_id: str
) -> BroadcastBody | HandlesBody:
    if isinstance(update_info, list):
        raise NotOffered("update_info must be one object: every rank reads the same")
    if link.is_group:
        return _broadcast(link, convert(update_info, UpdateInfo, "update_info"), session_id)
    info = convert(update_info, HandlesInfo, "update_info")
    return HandlesBody(info=info, session_id=session_id, kv_cache="by_salt")


def _broadcast(link: _Link, info: UpdateInfo, session_id: str) -> BroadcastBody:
    if info.num_updates_list is not None:
        return _sparse_broadcast(info, info.num_updates_list, session_id)
    bucket_bytes = link.bucket_bytes
    if info.packed is not None:
        said = info.packed_buffer_size_bytes or link.bucket_bytes
        bucket_bytes = (said or PACKED_BYTES) if info.packed else None
    return BroadcastBody(
        names=info.names,
        dtypes=info.dtype_names,
        shapes=info.shapes,
        load_format=None if bucket_bytes is None else FLATTENED_BUCKET,
        bucket_bytes=bucket_bytes,
        session_id=session_id,
        kv_cache="by_salt",
    )


def _sparse_broadcast(info: UpdateInfo, counts: list[int], session_id: str) -> BroadcastBody:
    """Return the update of vLLM's ``sparse_nccl`` backend: it sends indices, then values."""
    return BroadcastBody(
        names=[f"{name}.{half}" for name in info.names for half in ("indices", "values")],
        dtypes=[dtype for values in info.dtype_names for dtype in ("int32", values)],
        shapes=[[count] for count in counts for _ in range(2)],
        full_shapes=dict(zip(info.names, info.shapes, strict=True)),
        load_format=SPARSE,
        session_id=session_id,
        kv_cache="by_salt",
    )
