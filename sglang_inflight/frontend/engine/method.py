"""One method of ``sglang.Engine``, in both its forms."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang_inflight.answer import Answer
from sglang_inflight.frontend.bodies import Body
from sglang_inflight.frontend.engine.arguments import Arguments, Given
from sglang_inflight.frontend.engine.shared_loop import refuse_where_a_loop_runs

if TYPE_CHECKING:
    from sglang_inflight.frontend.adopted import AdoptedEngine

B = TypeVar("B", bound=Body)


class EngineMethod(Generic[B]):
    """``asynchronous`` is for the event loop that the engine lives on, ``waiting`` for threads.

    Both read their arguments, and refuse what cannot be, before anything is done. Both return
    the JSON that HTTP answers with, where ``do`` returns an ``Answer``. An engine lives on the
    loop that it was first used on: there its answers come in.
    """

    def __init__(
        self,
        do: Callable[[Any, B], Awaitable[Any]],
        shape: type[B],
        positional: tuple[str, ...],
        prepare: Callable[[Any, Given], Given] | None,
    ) -> None:
        self.name = do.__name__
        arguments = Arguments(self.name, shape, positional, prepare)

        async def attend(engine: AdoptedEngine, body: B) -> Any:
            answer = await engine.tokenizer_manager.inflight.lifetime.attend(do(engine, body))
            return answer.as_json() if isinstance(answer, Answer) else answer

        async def asynchronous(engine: AdoptedEngine, *args: Any, **named: Any) -> Any:
            require_home(engine)
            return await attend(engine, arguments.read(engine, args, named))

        def waiting(engine: AdoptedEngine, *args: Any, **named: Any) -> Any:
            refuse_where_a_loop_runs(f"await engine.async_{self.name}(...) instead")
            body = arguments.read(engine, args, named)
            return engine.loop.run_until_complete(attend(engine, body))

        self.asynchronous = _dress(asynchronous, f"async_{self.name}", do, arguments)
        self.waiting = _dress(waiting, self.name, do, arguments)


def engine_method(
    shape: type[B],
    *positional: str,
    prepare: Callable[[Any, Given], Given] | None = None,
) -> Callable[[Callable[[Any, B], Awaitable[Any]]], EngineMethod[B]]:
    """Makes both forms of what is done with a body; ``Arguments`` says how it is read."""
    return lambda do: EngineMethod(do, shape, positional, prepare)


def require_home(engine: AdoptedEngine) -> None:
    """Raises ``RuntimeError`` on another event loop than the one that the engine lives on."""
    home = engine.tokenizer_manager.event_loop
    if home is not None and home is not asyncio.get_running_loop():
        raise RuntimeError(
            "this engine was first used on another event loop, which is where its answers come "
            "in: use one loop for as long as the engine lives"
        )


def _dress(
    method: Callable[..., Any], name: str, do: Callable[..., Any], arguments: Arguments[Any]
) -> Callable[..., Any]:
    """What ``help`` shows is what may be said."""
    method.__name__ = name
    method.__qualname__ = f"Engine.{name}"
    method.__doc__ = do.__doc__
    method.__signature__ = arguments.signature  # type: ignore[attr-defined]
    return method
