"""The door of ``Engine``, gRPC, and HTTP's routes without a door of their own.

It stands before ``TokenizerManager.generate_request``, where all requests meet. A request that its
route's door has let in passes at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.answer_versions import AnswerVersions, headers_of
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import admit
from sglang_inflight.hooking import AROUND, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager


class EndedInStream(ValueError):
    """An error of a stream: SGLang's streams turn a ``ValueError`` into their last event."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status_code = status


@hook(f"{TOKENIZER_MANAGER}.generate_request", AROUND, when=with_us)
async def pass_gate(
    generate: Callable[..., AsyncGenerator[Any, None]],
    tokenizer_manager: PatchedTokenizerManager,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of ``obj`` once the request may go to the schedulers.

    Raises an ``HTTPException`` for a whole answer by HTTP, whose status SGLang's routes read, and
    ``EndedInStream`` for a stream. Raises the error itself for ``Engine``.
    """
    outputs = generate(tokenizer_manager, obj, request)
    notes = AnswerVersions.of(request)
    is_stream = bool(getattr(obj, "stream", False))
    try:
        if not notes.is_let_through:
            await _let_in(tokenizer_manager.inflight, Asked.of(obj, body={}))
        async for output in outputs:
            if notes.start is None:
                notes.note(output, is_whole=not is_stream)
            yield output
    except InflightError as error:
        if request is None:
            raise
        if is_stream:
            raise EndedInStream(str(error), error.status) from error
        raise HTTPException(error.status, str(error), headers_of(error)) from error
    except HTTPException as error:
        # the prefill of a prompt with several samples has ended
        if request is None or not is_stream:
            raise
        raise EndedInStream(str(error.detail), error.status_code) from error
    finally:
        await outputs.aclose()


async def _let_in(frontend: Frontend, asked: Asked) -> None:
    if not any(name.startswith(HEALTH_CHECK_RID_PREFIX) for name in asked.names):
        await admit(frontend, asked)
