"""SGLang's adapter routes with our fields, and answers in SGLang's form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request, Response
from fastapi.responses import ORJSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.endpoints import Endpoint, describe_refusal
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def with_adapter(shape: type[B], handler: Callable[[B], Awaitable[LoRAUpdateOutput]]) -> Endpoint:
    """Return an endpoint for ``handler``. A started call runs to its end, as in SGLang."""

    async def answer(request: Request) -> Response:
        try:
            result = await handler(decode(await request.body(), shape))
        except InflightError as error:
            logger.warning("%s refused: %s", request.url.path, error)
            content = {**describe_refusal(error), "error_message": str(error)}
            return ORJSONResponse(content, status_code=error.status)
        return ORJSONResponse(msgspec_to_builtins(result))

    endpoint: Endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(answer)
    endpoint.__name__ = handler.__name__
    return endpoint
