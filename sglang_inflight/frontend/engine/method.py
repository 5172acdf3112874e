"""One method of ``sglang.Engine``, in a blocking and an async form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang_inflight.frontend.engine.arguments import Arguments, Given
from sglang_inflight.frontend.engine.shared_loop import is_nested, refuse_where_a_loop_runs
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import NotOffered

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine, PatchedTokenizerManager

B = TypeVar("B", bound=Body)


class EngineMethod(Generic[B]):
    """One call of an engine: ``asynchronous`` for its event loop, ``waiting`` for threads.

    ``instead`` is ``waiting`` as a hook around SGLang's method of the same name. All forms check
    their arguments before any effect. If ``do`` returns an ``Answer``, they return it as JSON, the
    same as over HTTP. An engine lives on the loop of its first use: its answers arrive there.
    """

    def __init__(
        self,
        do: Callable[[Any, B], Awaitable[Any]],
        shape: type[B],
        positional: tuple[str, ...],
        prepare: Callable[[Any, Given], Given] | None,
        without_us: Callable[[str], Any] | None,
    ) -> None:
        """``without_us`` makes the result, from the reason, for servers that run without us."""
        self.name = do.__name__
        arguments = Arguments(self.name, shape, positional, prepare)

        async def attend(engine: PatchedEngine, body: B) -> Any:
            answer = await manager_of(engine).inflight.lifetime.unless_shut_down(do(engine, body))
            return answer.as_json() if isinstance(answer, Answer) else answer

        async def asynchronous(engine: PatchedEngine, *args: Any, **named: Any) -> Any:
            if without_us is not None and (why := _why_inactive(engine)) is not None:
                return without_us(why)
            require_home(engine)
            return await attend(engine, arguments.read(engine, args, named))

        def waiting(engine: PatchedEngine, *args: Any, **named: Any) -> Any:
            if without_us is not None and (why := _why_inactive(engine)) is not None:
                return without_us(why)
            manager_of(engine)
            if not is_nested(engine.loop):
                refuse_where_a_loop_runs(f"await engine.async_{self.name}(...) instead")
            body = arguments.read(engine, args, named)
            return engine.loop.run_until_complete(attend(engine, body))

        def instead(
            upstreams: Callable[..., Any], engine: PatchedEngine, *args: Any, **named: Any
        ) -> Any:
            why = _why_inactive(engine)
            if why is None:
                return waiting(engine, *args, **named)
            if asked := arguments.find_ours(named):
                raise NotOffered(f"{', '.join(asked)}: {why}")
            theirs = {name: value for name, value in named.items() if name not in arguments.ours}
            return upstreams(engine, *args, **theirs)

        self.asynchronous = _dress(asynchronous, f"async_{self.name}", do, arguments)
        self.waiting = _dress(waiting, self.name, do, arguments)
        self.instead = instead


def engine_method(
    shape: type[B],
    *positional: str,
    prepare: Callable[[Any, Given], Given] | None = None,
    without_us: Callable[[str], Any] | None = None,
) -> Callable[[Callable[[Any, B], Awaitable[Any]]], EngineMethod[B]]:
    """Make an ``EngineMethod`` of a function of engine and body; see ``Arguments``."""
    return lambda do: EngineMethod(do, shape, positional, prepare, without_us)


def manager_of(engine: PatchedEngine) -> PatchedTokenizerManager:
    """Return the engine's manager. Raises ``NotOffered`` if the engine runs without us."""
    manager = engine.tokenizer_manager
    if manager is None:
        raise NotOffered(
            "this engine is a further node of a server: call the engine with node_rank=0, which "
            "acts for all nodes"
        )
    if manager.why_inactive is not None:
        raise NotOffered(manager.why_inactive)
    return manager


def _why_inactive(engine: PatchedEngine) -> str | None:
    """Return why the engine runs without us; None if it runs with us or is a further node."""
    manager = engine.tokenizer_manager
    return manager.why_inactive if manager is not None else None


def require_home(engine: PatchedEngine) -> None:
    """Raise ``RuntimeError`` if the running event loop is not the engine's."""
    home = manager_of(engine).event_loop
    if home is not None and home is not asyncio.get_running_loop():
        raise RuntimeError(
            "this engine was first used on another event loop, and its answers arrive there: use "
            "one loop for the engine's whole life"
        )


def _dress(
    method: Callable[..., Any], name: str, do: Callable[..., Any], arguments: Arguments[Any]
) -> Callable[..., Any]:
    """Set the name, docstring and signature shown by ``help``."""
    method.__name__ = name
    method.__qualname__ = f"Engine.{name}"
    method.__doc__ = do.__doc__
    method.__signature__ = arguments.signature  # type: ignore[attr-defined]
    return method
