"""prime-rl's ``/update_weights``: vLLM's path, with a checkpoint in a directory."""

from __future__ import annotations

import msgspec

from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.vllm.bodies import WeightDirBody
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.vocabulary.answers import Receipt, StagedSoFar
from sglang_inflight.vocabulary.bodies import DiskBody
from sglang_inflight.vocabulary.errors import Refused


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

    prime-rl pauses around the call, and salts its requests' cache by version. So running requests
    keep their KV, and the fence keeps that KV from later requests without a salt.
    """
    path = decode(content, WeightDirBody).weight_dir
    if path is None:
        raise Refused(
            "weight_dir is null: this server reads weights from a directory. Set prime-rl's "
            "weight_broadcast.type to 'filesystem'"
        )
    return await updates.update(DiskBody(model_path=path, non_blocking=True, kv_cache="fence"))
