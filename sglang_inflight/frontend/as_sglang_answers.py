"""Convert outcomes to the results of SGLang's own methods."""

from __future__ import annotations

from collections.abc import Awaitable

from sglang_inflight.answers import Begun, Deferred, Receipt, StagedSoFar
from sglang_inflight.errors import InflightError

SuccessAndMessage = tuple[bool, str]


async def as_sglang_answers(
    doing: Awaitable[Receipt | StagedSoFar | Begun | Deferred | None],
) -> SuccessAndMessage:
    """Return success and message; an ``InflightError`` becomes ``(False, its text)``."""
    try:
        answer = await doing
    except InflightError as error:
        return False, str(error)
    return True, answer.message if answer is not None else "Success"
