"""One method of ``sglang.Engine``, in a blocking and an async form."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import LoRAUpdateOutput

from sglang_inflight.frontend.as_sglang import as_sglang_answers
from sglang_inflight.frontend.engine.arguments import Arguments, Given
from sglang_inflight.frontend.engine.shared_loop import is_nested, refuse_where_a_loop_runs
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.bodies import Body, LoadAdapterBody, UnloadAdapterBody
from sglang_inflight.vocabulary.calls import Call
from sglang_inflight.vocabulary.errors import InflightError, NotOffered

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine, PatchedTokenizerManager


class EngineMethod:
    """One call of an engine: ``asynchronous`` for its event loop, ``waiting`` for threads.

    ``instead`` is ``waiting`` as a hook around SGLang's method of the same name. All forms check
    their arguments before any effect. They return an ``Answer`` as JSON, the same as over HTTP. An
    engine lives on the loop of its first use: its answers arrive there.
    """

    def __init__(
        self,
        call: Call,
        prepare: Callable[[Any, Given], Given] | None = None,
        without_us: Callable[[str], Any] | None = None,
    ) -> None:
        """``prepare`` converts arguments to fields; see ``Arguments``.

        ``without_us`` makes the result, from the reason, for servers that run without us.
        """
        self.name = call.name
        self.is_sglangs = call.is_sglangs
        arguments = Arguments(call.name, call.body, call.positional or (), prepare)

        async def attend(engine: PatchedEngine, body: Body) -> Any:
            inflight = manager_of(engine).inflight
            doing = _in_sglangs_form(call, body, inflight.handlers[call.name](body))
            answer = await inflight.lifetime.unless_shut_down(doing)
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

        self.asynchronous = _dress(asynchronous, f"async_{self.name}", call, arguments)
        self.waiting = _dress(waiting, self.name, call, arguments)
        self.instead = instead


def _in_sglangs_form(call: Call, body: Body, doing: Awaitable[Any]) -> Awaitable[Any]:
    """Return SGLang's result of its own calls. Non-blocking updates return ours, and raise."""
    if call.answers_pair and not getattr(body, "non_blocking", False):
        return as_sglang_answers(call, doing)
    if issubclass(call.body, LoadAdapterBody | UnloadAdapterBody):
        return _as_sglang_answers_of_adapters(doing)
    return doing


async def _as_sglang_answers_of_adapters(doing: Awaitable[LoRAUpdateOutput]) -> LoRAUpdateOutput:
    """Turn an ``InflightError`` into SGLang's unsuccessful answer."""
    try:
        return await doing
    except InflightError as error:
        return LoRAUpdateOutput(success=False, error_message=str(error))


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
    method: Callable[..., Any], name: str, call: Call, arguments: Arguments[Any]
) -> Callable[..., Any]:
    """Set the name, docstring and signature shown by ``help``."""
    method.__name__ = name
    method.__qualname__ = f"Engine.{name}"
    method.__doc__ = inspect.cleandoc(call.doc)
    method.__signature__ = arguments.signature  # type: ignore[attr-defined]
    return method
