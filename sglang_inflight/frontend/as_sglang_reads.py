"""Bodies of SGLang's own routes, read as SGLang reads them.

It converts what pydantic converts, a port in quotes for one, and passes over fields that
it does not know. Frameworks rely on both. Our own fields are read strictly: there is no
client yet that sends them otherwise.
"""

from __future__ import annotations

import difflib
import functools
import logging
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from sglang_inflight.errors import Refused

logger = logging.getLogger(__name__)


def as_sglang_reads(
    values: dict[str, Any], theirs: type[msgspec.Struct], ours: tuple[str, ...]
) -> dict[str, Any]:
    """``values`` of fields that there are, each of the type that SGLang would make of it.

    ``theirs`` is SGLang's own type of the body, and ``ours`` are the names of all fields.
    Raises ``Refused`` for a field that is nearly one of ours, beside another that is: its caller
    means us, and would wait for what it asked for. A client of SGLang's may send such a one,
    ``timeout`` for one, and means nothing by it.
    """
    adapters = _adapters(theirs)
    added = set(ours) - adapters.keys()
    read = {}
    for name, value in values.items():
        if name in adapters:
            read[name] = adapters[name].read(value)
        elif name in ours:
            read[name] = value
        else:
            meant = difflib.get_close_matches(name, added, 1, cutoff=0.8)
            if meant and not added.isdisjoint(values):
                raise Refused(f"unknown field `{name[:100]}`: is `{meant[0]}` meant?")
            _say_that_it_is_ignored(name[:100], theirs.__name__)
    return read


@functools.lru_cache(maxsize=256)
def _say_that_it_is_ignored(name: str, body: str) -> None:
    """Once, however often it is sent."""
    logger.warning("The field %r is unknown to %s and ignored, as SGLang does.", name, body)


class _Adapter:
    def __init__(self, field_type: Any) -> None:
        self._type = field_type
        self._pydantic: TypeAdapter[Any] = TypeAdapter(field_type)

    def read(self, value: Any) -> Any:
        try:
            msgspec.convert(value, self._type)
        except msgspec.ValidationError:
            try:
                return self._pydantic.validate_python(value)
            except ValidationError:
                # refused with the others of its body, by name
                return value
        return value


@functools.cache
def _adapters(theirs: type[msgspec.Struct]) -> dict[str, _Adapter]:
    # what every message of SGLang's has besides is no field of a body
    return {
        field.name: _Adapter(field.type)
        for field in msgspec.structs.fields(theirs)
        if field.name not in ("rid", "http_worker_ipc")
    }
