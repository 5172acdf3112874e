"""How SGLang finds the handler of a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sglang_inflight.sglang_types.describes import describes

D = TypeVar("D")


@describes("sglang.utils.TypeBasedDispatcher")
class TypeBasedDispatcher(Protocol):
    """``_mro_cache`` holds handlers by types that were not found in ``_mapping`` themselves."""

    _mapping: dict[type, Callable[[Any], Any]]
    _mro_cache: dict[type, Any]

    def __iadd__(self: D, other: Any) -> D: ...
