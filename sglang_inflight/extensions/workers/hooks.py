"""Hooks on SGLang's launching process, router and detokenizer, for several workers."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang_inflight.extensions.workers.folder import ATTRIBUTE
from sglang_inflight.hooking import AROUND, MULTI_TOKENIZER, hook
from sglang_inflight.inactive import why_inactive
from sglang_inflight.messages import GenerationContinues, RankIsSilent

if TYPE_CHECKING:
    from sglang_inflight.extensions.workers.owner import Owner

# owner of the server launched last by this process
_owner: Owner | None = None


@hook(f"{MULTI_TOKENIZER}.write_to_shared_memory", AROUND)
def add_owner_endpoint(write: Callable[..., Any], obj: Any, name: str) -> Any:
    """Hook around writing the workers' start arguments: start the owner and add its endpoint."""
    global _owner
    if why_inactive() is not None:
        return write(obj, name)
    # SGLang's managers are slow to import, and most servers need no owner
    from sglang_inflight.extensions.workers.owner import Owner

    port_args, server_args, scheduler_info = obj
    _owner = Owner(server_args, port_args)
    _owner.start()
    extended = copy.copy(port_args)
    setattr(extended, ATTRIBUTE, _owner.owner_endpoint)
    return write((extended, server_args, scheduler_info), name)


@hook(f"{MULTI_TOKENIZER}.MultiTokenizerRouter._distribute_result_to_workers", AROUND)
def route_to_owner(
    distribute: Callable[..., Awaitable[None]], router: object, recv_obj: Any
) -> Awaitable[None]:
    """Hook around the router: send the ranks' unsolicited messages to the owner."""
    if _owner is not None and isinstance(recv_obj, GenerationContinues | RankIsSilent):
        recv_obj.http_worker_ipc = _owner.answers
    return distribute(router, recv_obj)


@hook(
    "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out", AROUND
)
def separate_workers(detokenize: Callable[..., Any], detokenizer: object, recv_obj: Any) -> Any:
    """Hook around detokenizing: make the names of different workers' requests different.

    Replicas may have requests of one name from different workers. The detokenizer keeps its state
    by name alone, and dies when one of these requests ends before the other.
    """
    rids, workers = recv_obj.rids, recv_obj.http_worker_ipcs
    if not workers or workers[0] is None:
        return detokenize(detokenizer, recv_obj)
    recv_obj.rids = [f"{rid}\n{worker}" for rid, worker in zip(rids, workers, strict=True)]
    output = detokenize(detokenizer, recv_obj)
    output.rids = rids
    return output
