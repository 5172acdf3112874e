"""Read bodies and write results of SGLang's own calls as SGLang does.

SGLang converts values as pydantic does (a port in quotes, for one), and ignores unknown fields.
Frameworks rely on both. Our own fields are read strictly, because every client of ours sends the
right types.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Awaitable
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from sglang_inflight.vocabulary.answers import Begun, Deferred, Receipt, StagedSoFar
from sglang_inflight.vocabulary.errors import InflightError, Refused

logger = logging.getLogger(__name__)


def as_sglang_reads(
    values: dict[str, Any], theirs: type[msgspec.Struct], ours: tuple[str, ...]
) -> dict[str, Any]:
    """Return the known fields of ``values``, each converted as SGLang would convert it.

    ``theirs`` is SGLang's type of the body, ``ours`` has the names of all fields. Raises
    ``Refused`` for a misspelt field of ours beside another field of ours: its caller relies on
    this server. A lone unknown field is ignored even if its name is close to ours: SGLang's
    clients send, for example, ``timeout``.
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
            _warn_ignored(name[:100], theirs.__name__)
    return read


@functools.lru_cache(maxsize=256)
def _warn_ignored(name: str, body: str) -> None:
    """Log this once per field and body."""
    logger.warning("Ignored the field %r, unknown to %s, as SGLang does.", name, body)


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
                # decoding refuses the value later, with the field's name
                return value
        return value


@functools.cache
def _adapters(theirs: type[msgspec.Struct]) -> dict[str, _Adapter]:
    # rid and http_worker_ipc are in every SGLang message, and no fields of a body
    return {
        field.name: _Adapter(field.type)
        for field in msgspec.structs.fields(theirs)
        if field.name not in ("rid", "http_worker_ipc")
    }


SuccessAndMessage = tuple[bool, str]


async def as_sglang_answers(
    doing: Awaitable[Receipt | StagedSoFar | Begun | Deferred | None],
) -> SuccessAndMessage:
    """Return success and message; an ``InflightError`` becomes ``(False, its text)``."""
    try:
        answer = await doing
    except InflightError as error:
        return False, str(error)
    return True, answer.message if answer is not None else "Success"
