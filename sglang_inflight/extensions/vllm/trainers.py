"""Routes of vLLM's for single trainers: SkyRL's weight sync, prime-rl's updates from a directory.

SkyRL calls ``/collective_rpc``. vLLM runs any method of that name in every worker. SkyRL adds
methods of its own, and calls them in this order, between a ``/pause`` with mode ``keep`` and a
``/resume``:

    skyrl_sleep_for_weight_sync     only checks for the pause: in vLLM it frees memory, but here
                                    weights are staged beside the served ones
    skyrl_wake_for_weight_sync      only checks for the pause
    skyrl_start_weight_update       begins a session
    update_weights_nccl             stages a broadcast
    update_weights_ipc              stages tensors in the trainer's memory on the same GPU
    skyrl_finish_weight_update      commits

prime-rl calls ``/update_weights``, vLLM's path, with a checkpoint in a directory.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang_inflight.extensions.vllm.bodies import StartBody, WeightDirBody
from sglang_inflight.extensions.vllm.transfer import Transfer
from sglang_inflight.frontend.as_sglang import convert, decode
from sglang_inflight.frontend.http.endpoints import Content
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.vocabulary.answers import Receipt, StagedSoFar
from sglang_inflight.vocabulary.bodies import Body, DiskBody
from sglang_inflight.vocabulary.errors import Conflict, NotOffered, Refused


class RPCBody(Body, kw_only=True, forbid_unknown_fields=False):
    method: str
    # SkyRL names its arguments
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class NoArguments(Body, kw_only=True):
    pass


class SleepArguments(Body, kw_only=True):
    offload_kv: bool = True


class WakeArguments(Body, kw_only=True):
    tags: list[Literal["weights", "kv_cache"]]


class CollectiveRPC:
    def __init__(self, transfer: Transfer, pauses: Pauses, ranks: Ranks) -> None:
        self._transfer = transfer
        self._pauses = pauses
        self._ranks = ranks
        self._methods = {
            "skyrl_sleep_for_weight_sync": self._sleep,
            "skyrl_wake_for_weight_sync": self._wake,
            "skyrl_start_weight_update": self._start,
            "update_weights_nccl": self._receive,
            "update_weights_ipc": self._receive,
            "skyrl_finish_weight_update": self._finish,
        }

    async def call(self, content: bytes) -> Content:
        body = decode(content, RPCBody)
        method = self._methods.get(body.method)
        if method is None or body.args:
            raise NotOffered(
                f"/collective_rpc does not offer {body.method[:100]!r} with {len(body.args)} "
                f"positional arguments: it offers {', '.join(self._methods)}, with kwargs"
            )
        await method(body.kwargs)
        # one result per worker; these methods return None
        return {"results": [None] * self._ranks.count}

    async def _sleep(self, arguments: dict[str, Any]) -> None:
        convert(arguments, SleepArguments, "kwargs")
        await self._require_pause()

    async def _wake(self, arguments: dict[str, Any]) -> None:
        convert(arguments, WakeArguments, "kwargs")
        await self._require_pause()

    async def _require_pause(self) -> None:
        if not await self._pauses.is_paused():
            raise Conflict("generation is not paused: call /pause first")

    async def _start(self, arguments: dict[str, Any]) -> None:
        convert(arguments, StartBody, "kwargs")
        await self._transfer.start("target")

    async def _receive(self, arguments: dict[str, Any]) -> None:
        # not converted here: ``receive`` handles bad arguments of a trainer already broadcasting
        await self._transfer.receive(msgspec.json.encode(arguments))

    async def _finish(self, arguments: dict[str, Any]) -> None:
        convert(arguments, NoArguments, "kwargs")
        await self._transfer.finish(None)


class _MayName(msgspec.Struct):
    weight_dir: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def names_weight_dir(content: bytes) -> bool:
    """Whether the body is prime-rl's, and not vLLM's."""
    try:
        return msgspec.json.decode(content, type=_MayName).weight_dir is not msgspec.UNSET
    except (msgspec.DecodeError, RecursionError):
        return False


async def update_from_weight_dir(updates: Updates, content: bytes) -> Receipt | StagedSoFar:
    """Update from the directory's checkpoint, in one commit.

    prime-rl pauses around the call, and salts a rollout by the version that it begins with. So
    running requests keep their KV, and a conversation's next turn finds that of earlier turns under
    its salt. Later requests without a salt find no earlier KV.
    """
    path = decode(content, WeightDirBody).weight_dir
    if path is None:
        raise Refused(
            "weight_dir is null: this server reads weights from a directory. Set prime-rl's "
            "weight_broadcast.type to 'filesystem'"
        )
    return await updates.update(
        DiskBody(model_path=path, non_blocking=True, **updates.policy_or("by_salt"))
    )
