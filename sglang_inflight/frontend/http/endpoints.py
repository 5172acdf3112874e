"""Wrap the handlers of our routes: decoding, auth, disconnects, shutdown, errors as answers.

SGLang's adapter routes take our fields, and answer in SGLang's form.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import ORJSONResponse
from fastapi.routing import APIRoute
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.as_sglang import decode, read_query
from sglang_inflight.frontend.handlers import Arrival
from sglang_inflight.frontend.http.answer_versions import content_of, headers_of
from sglang_inflight.frontend.http.large_bodies import large_body
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.bodies import Body, NoBody, TensorBody
from sglang_inflight.vocabulary.errors import Dropped, InflightError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

logger = logging.getLogger(__name__)

CALLER_HAS_LEFT = "its caller has left before the answer"

B = TypeVar("B", bound=Body)
# a handler's result, converted to JSON by its endpoint
Content = Answer | dict[str, Any]
T = TypeVar("T")
Endpoint = Callable[..., Awaitable[Response]]
_OURS: Mapping[str, str] = MappingProxyType({})
# names of the call's route for calls that our errors name
_callers_names: ContextVar[Mapping[str, str]] = ContextVar("_callers_names", default=_OURS)


@contextmanager
def no_piece() -> Iterator[Arrival]:
    yield Arrival()


def with_body(
    shape: type[B],
    handler: Callable[[B], Awaitable[Content]],
    piece: Callable[[], AbstractContextManager[Arrival]] = no_piece,
    give_back: Callable[[B, Content], Awaitable[None]] | None = None,
) -> Endpoint:
    """Return an endpoint for JSON bodies of ``shape``.

    ``piece`` wraps the whole call. ``give_back`` gets body and result; see ``while_connected``.
    """

    async def read_and_answer(request: Request) -> Content:
        with piece() as arrival:
            body = decode(await request.body(), shape)
            arrival.is_whole = True
            undo = functools.partial(give_back, body) if give_back is not None else None
            return await while_connected(request, handler(body), undo)

    return guarded(functools.wraps(handler)(read_and_answer), takes_request=True)


async def while_connected(
    request: Request,
    doing: Awaitable[T],
    give_back: Callable[[T], Awaitable[None]] | None = None,
) -> T:
    """Return the result of ``doing``; cancel ``doing`` if the caller disconnects.

    Without the cancel, a caller who retries would have the work done twice. If ``doing`` finishes
    despite the disconnect, ``give_back`` undoes the result. The request's body must have been
    read: the next message of the connection is then its end.
    """
    work = asyncio.ensure_future(doing)
    leaving = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            logger.warning("%s: its caller has left before the answer.", request.url.path)
            work.cancel()
            await asyncio.wait({work})
            if work.cancelled():
                raise Dropped(CALLER_HAS_LEFT)
        answer = await work
        if give_back is not None and leaving.done():
            await give_back(answer)
            raise Dropped(CALLER_HAS_LEFT)
        return answer
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.wait({work, leaving})


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def with_payloads(
    handler: Callable[[TensorBody], Awaitable[Content]],
    piece: Callable[[], AbstractContextManager[Arrival]],
) -> Endpoint:
    """Return an endpoint for JSON bodies with whole tensors in base64."""

    async def read_and_answer(request: Request) -> Content:
        with large_body() as large, piece() as arrival:
            body = decode(await large.read(request), TensorBody)
            payloads = body.serialized_named_tensors
            on_one_machine = get_parallel().nnodes == 1
            # mypy: the field's type is for JSON, and has no PayloadFile
            body.serialized_named_tensors = large.put_back(payloads, as_files=on_one_machine)  # type: ignore[assignment]
            arrival.is_whole = True
            return await while_connected(request, handler(body))

    return guarded(functools.wraps(handler)(read_and_answer), takes_request=True)


def without_body(handler: Callable[[NoBody], Awaitable[Content]]) -> Endpoint:
    """Return an endpoint for a GET without parameters."""

    async def answer() -> Content:
        return await handler(NoBody())

    return guarded(functools.wraps(handler)(answer))


def with_query(shape: type[B], handler: Callable[[B], Awaitable[Content]]) -> Endpoint:
    """Return an endpoint for queries of ``shape``; ignore the body."""

    async def read_and_answer(request: Request) -> Content:
        query = read_query(request.query_params.multi_items(), shape)
        await request.body()
        return await while_connected(request, handler(query))

    return guarded(functools.wraps(handler)(read_and_answer), takes_request=True)


def guarded(handler: Callable[..., Awaitable[Content]], *, takes_request: bool = False) -> Endpoint:
    """Return an endpoint with SGLang's admin auth level and errors as JSON with their status."""

    async def answer(*args: Any) -> Response:
        try:
            return ORJSONResponse(msgspec.to_builtins(await handler(*args)))
        except InflightError as error:
            logger.warning("%s refused: %s", handler.__name__, error)
            return refusal(error)

    async def with_request(request: Request) -> Response:
        return await answer(request)

    async def without_request() -> Response:
        return await answer()

    level: Callable[..., Any] = auth_level(AuthLevel.ADMIN_OPTIONAL)
    endpoint: Endpoint = level(with_request if takes_request else without_request)
    endpoint.__name__ = handler.__name__
    return endpoint


def refusal(error: InflightError) -> Response:
    return ORJSONResponse(
        describe_refusal(error), status_code=error.status, headers=headers_of(error)
    )


def describe_refusal(error: InflightError) -> dict[str, Any]:
    """Return the error as JSON: the message for SGLang's, and for OpenAI's and vLLM's clients."""
    message = _in_callers_names(str(error))
    inner = {"message": message, "type": type(error).__name__, "code": error.status}
    return {
        "success": False,
        "status": "error",
        "message": message,
        "error": inner,
        **content_of(error),
    }


def _in_callers_names(message: str) -> str:
    names = _callers_names.get()
    if not names:
        return message
    return re.sub(rf"/?\b({'|'.join(names)})\b", lambda found: names[found[1]], message)


def fails_on_shutdown(lifetime: Lifetime, names: Mapping[str, str] = _OURS) -> type[APIRoute]:
    """Return a route class; calls still waiting at the end of ``lifetime`` get its error.

    ``names`` are the callers' names for calls that our errors name.
    """

    class ShutdownAwareRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def answer_unless_shut_down(request: Request) -> Response:
                # each request has a task, and so a context of its own
                _callers_names.set(names)
                return await lifetime.unless_shut_down(answer(request))

            return answer_unless_shut_down

    return ShutdownAwareRoute


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
