"""End a server with us: end pauses, answer waiting calls.

A SIGTERM shuts the server down. With several tokenizer workers only a SIGTERM to the launcher does.
A SIGTERM to a worker may only restart that worker, while the server goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import ShutdownReq

from sglang_inflight.frontend.frontend import ENDS, Frontend
from sglang_inflight.hooking import AFTER, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.bodies import ContinueBody
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedSignalHandler, PatchedTokenizerManager

logger = logging.getLogger(__name__)


@hook("sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler", AFTER, when=with_us)
def end_pauses(_: None, handler: PatchedSignalHandler, *args: Any) -> None:
    """End pauses and waits for versions after SGLang's SIGTERM handler, on the event loop.

    SGLang then waits for the last request's end, and no request ends during a pause. With several
    workers the owner decides: SIGTERM may have reached one worker only, and the server goes on.
    """
    tokenizer_manager = handler.tokenizer_manager
    tokenizer_manager.inflight.versions.end("the server is shutting down (SIGTERM)")
    if not tokenizer_manager.inflight.is_worker:
        release_all(tokenizer_manager)


@hook(f"{TOKENIZER_MANAGER}._dispatch_to_scheduler", AFTER, order=1, when=with_us)
def end_calls(_: None, tokenizer_manager: PatchedTokenizerManager, obj: object) -> None:
    """Fail the calls that wait for ranks, after the ``ShutdownReq``, SGLang's last message.

    SGLang's HTTP server would wait for their connections for ever.
    """
    if isinstance(obj, ShutdownReq):
        frontend = tokenizer_manager.inflight
        frontend.lifetime.end("the server was shut down (SIGTERM), and its ranks ended")


def release_all(tokenizer_manager: PatchedTokenizerManager) -> None:
    if tokenizer_manager.is_pause:
        logger.warning("SIGTERM: releasing all pauses, so that running requests can finish.")
    frontend = tokenizer_manager.inflight
    frontend.in_background(_release_all(frontend))


async def _release_all(frontend: Frontend) -> None:
    """Release what holds requests, so that they can end."""
    try:
        for end in ENDS:
            await end(frontend)
    except InflightError as error:
        logger.warning("%s", error)
    await frontend.pauses.resume(ContinueBody(torch_empty_cache=False))
    await frontend.updates.drop_all("the server is shutting down (SIGTERM)")
