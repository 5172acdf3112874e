"""Read bodies, and write results of SGLang's own calls as SGLang does.

SGLang converts values as pydantic does (a port in quotes, for one), and ignores unknown fields.
Frameworks rely on both. Our own fields are read strictly, because every client of ours sends the
right types. On our routes an unknown field is an error.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import msgspec
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers import io_struct

from sglang_inflight.vocabulary.answers import Begun, Deferred, Receipt, StagedSoFar
from sglang_inflight.vocabulary.bodies import DEFAULT_GROUP, Body
from sglang_inflight.vocabulary.calls import Call
from sglang_inflight.vocabulary.deprecations import present_names
from sglang_inflight.vocabulary.errors import InflightError, Refused

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def decode(body: bytes, shape: type[B]) -> B:
    """Decode JSON into a ``shape``; raise ``Refused`` with the wrong field's name."""
    content = body or b"{}"
    try:
        try:
            return msgspec.json.decode(content, type=shape)
        except msgspec.ValidationError:
            values = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f"bad request body: {error}") from error
    return convert(values, shape, "request body")


def read_query(items: Iterable[tuple[str, str]], shape: type[B]) -> B:
    """Convert a query into a ``shape``; raise ``Refused`` with the wrong parameter's name."""
    values: dict[str, str] = {}
    for name, text in items:
        if name in values:
            raise Refused(f"bad query: {name} is given twice")
        values[name] = text
    return convert(values, shape, "query", strict=False)


def convert(values: object, shape: type[B], name: str, *, strict: bool = True) -> B:
    """Convert ``values`` into a ``shape``; raise ``Refused`` with the wrong field's name."""
    theirs = sglangs_class(shape)
    if isinstance(values, dict):
        try:
            values = {**present_names(values, "field", logger.warning)}
        except ValueError as error:
            raise Refused(f"bad {name}: {error}") from error
    if theirs is not None and isinstance(values, dict):
        values = as_sglang_reads(values, theirs, shape.__struct_fields__)
    try:
        return msgspec.convert(values, shape, strict=strict)
    except msgspec.ValidationError as error:
        raise Refused(f"bad {name}: {error}") from error


class _NamesAGroup(msgspec.Struct):
    group_name: str = DEFAULT_GROUP


def group_named_in(body: bytes) -> str:
    """Return the group name in a distributed update's body, even of a refused body."""
    try:
        return msgspec.json.decode(body, type=_NamesAGroup).group_name
    except (msgspec.DecodeError, RecursionError):
        return DEFAULT_GROUP


def sglangs_class(shape: type[Body]) -> type[msgspec.Struct] | None:
    """Return SGLang's class of a body, or None if the call is ours."""
    return getattr(io_struct, shape.sglang) if shape.sglang is not None else None


def our_fields(shape: type[Body]) -> dict[str, Any]:
    """Return the fields missing in SGLang's class, with their defaults."""
    theirs = sglangs_class(shape)
    known = theirs.__struct_fields__ if theirs is not None else ()
    return {f.name: f.default for f in msgspec.structs.fields(shape) if f.name not in known}


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


async def as_sglang_answers(
    call: Call, doing: Awaitable[Receipt | StagedSoFar | Begun | Deferred | None]
) -> tuple[bool, str] | tuple[bool, str, int]:
    """Return success and message; an ``InflightError`` becomes ``(False, its text)``.

    An update from disk has a third value, SGLang's count of paused requests. It is always 0.
    """
    try:
        answer = await doing
        success, message = True, answer.message if answer is not None else "Success"
    except InflightError as error:
        success, message = False, str(error)
    if call.name == "update_weights_from_disk":
        return success, message, 0
    return success, message
