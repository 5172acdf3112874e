"""Hooks: functions and methods of ours, declared where they are, that SGLang calls at its own.

Importing a module declares its hooks. ``plugin.py`` names the modules, and gives their hooks to
SGLang's ``HookRegistry``. A hook has the parameters that the registry passes for its kind.

**Methods.** ``via`` leads from the object whose method is hooked to ours: a path of attributes, or
a function. A hook around then gets SGLang's method bound to its object.

**Servers without us.** A process may have loaded us and launch a server without us
(``inactive.py``). ``when=with_us`` limits a hook to objects of a server with us.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from sglang.srt.plugins.hook_registry import HookType

F = TypeVar("F", bound=Callable[..., Any])
Find = Callable[[Any], Any]

AFTER, AROUND, BEFORE, REPLACE = (
    HookType.AFTER,
    HookType.AROUND,
    HookType.BEFORE,
    HookType.REPLACE,
)
COMMUNICATOR = "sglang.srt.managers.communicator.FanOutCommunicator"
DECODE = "sglang.srt.disaggregation.decode"
ENGINE = "sglang.srt.entrypoints.engine.Engine"
EXCHANGE = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo"
KV = "sglang.srt.mem_cache.common"
LORA = "sglang.srt.lora.lora.LoRAAdapter"
MULTI_TOKENIZER = "sglang.srt.managers.multi_tokenizer_mixin"
OPENAI_SERVING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"
PENALTIES = "sglang.srt.sampling.penaltylib"
PREFILL_SCHEDULER = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
RAY_ENGINE = "sglang.srt.ray.engine"
REQ = "sglang.srt.managers.schedule_batch.Req"
SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
SAMPLING_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SENDER = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
TRANSFERS = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"


class Hook(NamedTuple):
    """``function`` as SGLang's registry calls it."""

    target: str
    function: Callable[..., Any]
    kind: HookType


# (order, hook), by the module that declares it
_declared: dict[str, list[tuple[int, Hook]]] = defaultdict(list)


def hook(
    target: str,
    kind: HookType,
    *,
    order: int = 0,
    via: str | Find | None = None,
    when: Callable[[Any], bool] | None = None,
) -> Callable[[F], F]:
    """Declare the decorated function, or method with ``via``, a hook of ``target``.

    Of several hooks on one target, the one of a higher ``order`` is outside. ``when`` returns for
    the hooked object whether the hook runs; otherwise SGLang's function runs alone.
    """

    def declare(ours: F) -> F:
        function = _as_called(ours, kind, via, when)
        _declared[ours.__module__].append((order, Hook(target, *function)))
        return ours

    return declare


def hook_each(
    module: str,
    functions: Mapping[str, Callable[..., Any]],
    kind: HookType,
    *,
    when: Callable[[Any], bool] | None = None,
) -> None:
    """Declare hooks of ``module``: functions by their targets."""
    for target, ours in functions.items():
        _declared[module].append((0, Hook(target, *_as_called(ours, kind, None, when))))


def hooks_of(modules: Iterable[str]) -> list[Hook]:
    """Import ``modules``, and return their hooks in the order of their registration.

    Raises ``ValueError`` for two hooks of one order on one target.
    """
    ordered: dict[tuple[str, int], Hook] = {}
    for module in modules:
        importlib.import_module(module)
        for order, each in _declared[module]:
            if (each.target, order) in ordered:
                raise ValueError(f"two hooks on {each.target} have the order {order}")
            ordered[each.target, order] = each
    return [ordered[key] for key in sorted(ordered)]


def one_around_each(hooks: Iterable[Hook]) -> list[Hook]:
    """Put hooks around one target into one hook, in the place of the outermost.

    SGLang warns of a second one at every start. ``hooks`` are in the order of their registration.
    """
    found = list(hooks)
    outermost = {each.target: each for each in found if each.kind is AROUND}
    around: dict[str, list[Callable[..., Any]]] = defaultdict(list)
    for each in found:
        if each.kind is AROUND:
            around[each.target].append(each.function)
    return [
        each._replace(function=functools.reduce(_surround, around[each.target]))
        if each.kind is AROUND
        else each
        for each in found
        if each.kind is not AROUND or each is outermost[each.target]
    ]


def _surround(inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook around: ``outer`` around ``inner``."""

    @functools.wraps(outer)
    def both(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return outer(functools.partial(inner, original), *args, **kwargs)

    return both


def with_us(owner: Any) -> bool:
    """Whether ``owner``, or its ``TokenizerManager``, has our object: its server runs with us."""
    manager = getattr(owner, "tokenizer_manager", owner)
    return hasattr(manager, "inflight")


def _as_called(
    ours: Callable[..., Any],
    kind: HookType,
    via: str | Find | None,
    when: Callable[[Any], bool] | None,
) -> tuple[Callable[..., Any], HookType]:
    """Return the hook as the registry calls it. A replacement with ``when`` is a hook around."""
    if via is None and when is None:
        return ours, kind
    find = operator.attrgetter(via) if isinstance(via, str) else via

    def applies(owner: Any) -> bool:
        return when is None or when(owner)

    def before(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(find(owner) if find else owner, *args, **kwargs) if applies(owner) else None

    def after(result: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(owner):
            return None
        if find is None:
            return ours(result, owner, *args, **kwargs)
        return ours(find(owner), result, *args, **kwargs)

    def around(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(owner):
            return original(owner, *args, **kwargs)
        if find is None:
            return ours(original, owner, *args, **kwargs)
        return ours(find(owner), functools.partial(original, owner), *args, **kwargs)

    def instead(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(owner):
            return original(owner, *args, **kwargs)
        return ours(find(owner) if find else owner, *args, **kwargs)

    if kind is not REPLACE:
        by_kind: dict[HookType, Callable[..., Any]]
        by_kind = {BEFORE: before, AFTER: after, AROUND: around}
        return functools.wraps(ours)(by_kind[kind]), kind
    if when is None:
        return functools.wraps(ours)(before), kind
    stand_in = functools.wraps(ours)(instead)
    # porting compares this signature with SGLang's source
    own = inspect.signature(ours).parameters.values()
    original = inspect.Parameter("original", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    stand_in.__signature__ = inspect.Signature([original, *own])  # type: ignore[attr-defined]
    return stand_in, AROUND
