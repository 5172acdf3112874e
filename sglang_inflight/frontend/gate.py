"""The gate in front of ``TokenizerManager.generate_request``, which every request passes.

HTTP's generating routes have doors of their own (``http/doors.py``), and their requests pass here
at once. ``Engine``, gRPC and all other routes wait here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import HTTPException

from sglang_inflight.frontend.admission import demands_of, is_health_check, names_of
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.answer_versions import AnswerVersions, headers_of
from sglang_inflight.vocabulary.errors import InflightError


class EndedInStream(ValueError):
    """An error of a stream: SGLang's streams turn a ``ValueError`` into their last event."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status_code = status


async def pass_gate(
    frontend: Frontend, outputs: AsyncGenerator[Any, None], obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """Yield ``outputs`` of ``obj`` once the request may go to the schedulers.

    Raises an ``HTTPException`` for a whole answer by HTTP, whose status SGLang's routes read, and
    ``EndedInStream`` for a stream. Raises the error itself for ``Engine``.
    """
    notes = AnswerVersions.of(request)
    is_stream = bool(getattr(obj, "stream", False))
    try:
        if not notes.is_let_through and not is_health_check(obj):
            await _wait(frontend, obj)
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


async def _wait(frontend: Frontend, obj: Any) -> None:
    frontend.admission.require_open()
    demands = demands_of(obj)
    if demands and frontend.admission.must_wait(demands):
        await frontend.admission.wait(demands, names_of(obj.rid))
