"""SGLang's dispatch of messages to handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sglang_inflight.sglang_types.describes import describes

D = TypeVar("D")


@describes("sglang.utils.TypeBasedDispatcher")
class TypeBasedDispatcher(Protocol):
    """``_mro_cache`` caches the handlers of types missing in ``_mapping``, found by a base."""

    _mapping: dict[type, Callable[[Any], Any]]
    _mro_cache: dict[type, Any]

    def __iadd__(self: D, other: Any) -> D: ...
