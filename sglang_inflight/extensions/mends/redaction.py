"""Redact keys and passwords among a server's arguments in answers and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.hooking import AFTER, ENGINE, hook

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

    from sglang_inflight.sglang_types import ServerArgs

# SGLang's own text for its watermark's keys
REDACTED = "<redacted>"

_NAMES_A_SECRET = re.compile(
    r"((api|access|secret|private)_?key|secret|passw(or)?d|passphrase|credentials?"
    r"|(access|api|auth|bearer|hf|session)_?token)$"
)
# A shorter secret occurs within other words, and the places of redaction would reveal it.
_SHORTEST = 4


def redact(value: Any) -> Any:
    """Return ``value`` with each secret replaced, also within texts of JSON objects."""
    if isinstance(value, Mapping):
        return {
            name: REDACTED if _is_secret(name, item) else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if (read := _json_object(value)) is not None:
        redacted = redact(read)
        return value if redacted == read else json.dumps(redacted)
    return value


def redact_command(command: str | None, server_args: ServerArgs) -> str | None:
    """Return a server's launch command without the secrets in ``server_args``."""
    record: Any = server_args
    secrets = {*_find_secrets(msgspec.structs.asdict(record))}
    if command is None or not secrets:
        return command
    if min(len(secret) for secret in secrets) < _SHORTEST:
        return REDACTED
    # the longest first, because one may be a part of another
    for secret in sorted(secrets, key=len, reverse=True):
        for form in (json.dumps(secret)[1:-1], repr(secret)[1:-1], secret):
            command = command.replace(form, REDACTED)
    return command


def _find_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if _is_secret(name, item):
                yield str(item)
            else:
                yield from _find_secrets(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_secrets(item)
    elif (read := _json_object(value)) is not None:
        yield from _find_secrets(read)


def _is_secret(name: object, value: Any) -> bool:
    named = isinstance(name, str) and _NAMES_A_SECRET.search(name.lower().replace("-", "_"))
    return bool(named) and value is not None and value != ""


def _json_object(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return None
    try:
        read: dict[str, Any] = json.loads(value)
    except ValueError:
        return None
    return read


@hook("sglang.srt.server_args.ServerArgs.resolved_dict", AFTER)
def redact_arguments(resolved: dict[str, Any], server_args: ServerArgs) -> dict[str, Any]:
    """Hook after SGLang's only function that turns arguments into answers and log lines."""
    redacted: dict[str, Any] = redact(resolved)
    return redacted


@hook("sglang.srt.utils.common.build_server_info", AFTER)
def redact_server_info(
    info: dict[str, Any], server_args: ServerArgs, scheduler_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Hook after the server info of HTTP and gRPC."""
    return {**info, "launch_command": redact_command(info["launch_command"], server_args)}


@hook(f"{ENGINE}.get_server_info", AFTER)
def redact_engine_info(info: dict[str, Any], engine: Engine) -> dict[str, Any]:
    return {**info, "launch_command": redact_command(info["launch_command"], engine.server_args)}
