"""Methods of ``sglang.Engine``, one for each row of ``vocabulary/calls.py`` with positions.

With ``non_blocking=True`` an update returns the receipt, and raises on failure. Without it an
update returns SGLang's ``(success, message)``; from disk ``(success, message, 0)``, where SGLang
has a count of paused requests, always 0. Both raise for invalid arguments.

A body's fields become the arguments of a Python method: Python and HTTP callers share names,
defaults and type checks.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import torch
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.utils import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

from sglang_inflight.frontend.as_sglang import as_sglang_answers, convert, our_fields
from sglang_inflight.frontend.engine.shared_loop import is_nested, refuse_where_a_loop_runs
from sglang_inflight.messages import BUCKETS
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.answers import Answer, describe_inactive
from sglang_inflight.vocabulary.bodies import Body, LoadAdapterBody, UnloadAdapterBody
from sglang_inflight.vocabulary.calls import TABLE, Call
from sglang_inflight.vocabulary.errors import InflightError, NotOffered

if TYPE_CHECKING:
    from sglang_inflight.frontend.frontend import Frontend
    from sglang_inflight.frontend.patched_types import PatchedEngine, PatchedTokenizerManager

B = TypeVar("B", bound=Body)

Given = dict[str, Any]


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
            doing = _in_sglangs_form(call, body, _carry_out(inflight, call, body))
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


async def _carry_out(inflight: Frontend, call: Call, body: Body) -> Any:
    return await inflight.handlers[call.name](body)


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


class Arguments(Generic[B]):
    """Arguments of one method: its signature, and their conversion to a ``shape``."""

    def __init__(
        self,
        name: str,
        shape: type[B],
        positional: tuple[str, ...] = (),
        prepare: Callable[[Any, Given], Given] | None = None,
    ) -> None:
        """``positional`` names the positional arguments; all other fields are keyword-only.

        ``prepare`` converts Python's types to fields. A positional argument without a field is
        required, and is input of ``prepare``.
        """
        self._name = name
        self._shape = shape
        self._prepare = prepare
        self.ours = frozenset(our_fields(shape)).difference(positional)
        self.signature = inspect.Signature(
            [
                inspect.Parameter("engine", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *_describe(shape, positional),
            ]
        )

    def read(self, engine: Any, args: tuple[Any, ...], named: Given) -> B:
        """Return the arguments as a ``shape``.

        Raises ``TypeError`` as Python does, ``Refused`` for an invalid value.
        """
        bound = self.signature.bind(engine, *args, **named).arguments
        del bound["engine"]
        # callers pass None for a default
        given = {
            name: value
            for name, value in bound.items()
            if value is not None or self._is_required(name)
        }
        if self._prepare is not None:
            given = self._prepare(engine, given)
        return convert(given, self._shape, f"argument of {self._name}")

    def find_ours(self, named: Given) -> list[str]:
        """Return our arguments with a non-default value."""
        defaults = {name: each.default for name, each in self.signature.parameters.items()}
        return [
            name
            for name, value in named.items()
            if name in self.ours and value is not None and value != defaults[name]
        ]

    def _is_required(self, name: str) -> bool:
        return self.signature.parameters[name].default is inspect.Parameter.empty


def _describe(shape: type[Body], positional: tuple[str, ...]) -> list[inspect.Parameter]:
    fields = {field.name: field for field in msgspec.structs.fields(shape)}
    annotations = {
        name: annotation
        for ancestor in reversed(shape.__mro__)
        for name, annotation in getattr(ancestor, "__annotations__", {}).items()
    }
    by_place, by_name = [], []
    for name in positional:
        field = fields.pop(name, None)
        by_place.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=_default(field) if field is not None else inspect.Parameter.empty,
                annotation=annotations.get(name, inspect.Parameter.empty),
            )
        )
    for name, field in fields.items():
        # ``prepare`` makes the required fields without a position
        if (default := _default(field)) is not inspect.Parameter.empty:
            by_name.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=annotations[name],
                )
            )
    return [*by_place, *by_name]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return inspect.Parameter.empty
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.UNSET else field.default


def _say_where(engine: PatchedEngine, given: Given) -> Given:
    for name in ("model_path", "lora_path"):
        if isinstance(given.get(name), os.PathLike):
            given[name] = os.fspath(given[name])
    return given


def _serialize(engine: PatchedEngine, given: Given) -> Given:
    """Make one payload per rank: a payload may be readable only once."""
    tensors = given.pop("named_tensors")
    if given.get("load_format") in BUCKETS:
        payloads = normalize_serialized_named_tensor_payloads(tensors)
    else:
        ranks = manager_of(engine).inflight.ranks.all
        if get_parallel().nnodes == 1:
            payloads = [MultiprocessingSerializer.serialize(tensors) for _ in ranks]
        else:
            # the serializer makes a handle, useless on another machine; a payload by value can be
            # read by each replica and stage
            payloads = [_by_value(tensors)] * len({tp_rank for _, _, tp_rank in ranks})
    return {**given, "serialized_named_tensors": payloads}


def _by_value(tensors: Iterable[tuple[str, Any]]) -> bytes:
    return pickle.dumps(
        [
            # a copy: pickling a view would include its whole storage
            (name, each.detach().cpu().clone() if isinstance(each, torch.Tensor) else each)
            for name, each in tensors
        ]
    )


def _name_dtypes(engine: PatchedEngine, given: Given) -> Given:
    """Convert dtypes to names; SGLang takes both."""
    names = [
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        for dtype in given.get("dtypes", ())
    ]
    return {**given, "dtypes": names} if names else given


def _serialize_adapter(engine: PatchedEngine, given: Given) -> Given:
    tensors = given.pop("tensors")
    payloads = engine._serialize_tensors_per_rank(tensors, given.get("load_format"))
    return {**given, "serialized_named_tensors": payloads}


_PREPARE: dict[str, Callable[[Any, Given], Given]] = {
    "update_weights_from_disk": _say_where,
    "update_weights_from_tensor": _serialize,
    "update_weights_from_distributed": _name_dtypes,
    "load_lora_adapter": _say_where,
    "load_lora_adapter_from_tensors": _serialize_adapter,
}

METHODS = {
    call.name: EngineMethod(
        call,
        _PREPARE.get(call.name),
        without_us=describe_inactive if call.name == "inflight_status" else None,
    )
    for call in TABLE.values()
    if call.positional is not None
}
