"""Reads NCCL's id of a group, as pickled by vLLM's trainers in their store."""

from __future__ import annotations

import pickletools
from typing import Any

from sglang_inflight.errors import Refused

# size of an id of ncclGetUniqueId
BYTES = 128
# many times the length of a pickled id
_LONGEST = 2048

# opcodes for framing and memos, without effect here
_BESIDE_THE_POINT = frozenset(
    {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"},
)
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})


def read_unique_id(content: bytes) -> bytes:
    """Return the id in a pickled ``ncclUniqueId``, a structure of ``ctypes``.

    Anybody on the network may have written ``content``, and unpickling would run it. So no object
    is made and no named module is imported. The opcodes must be exactly those of such a pickled
    structure. Raise ``Refused`` otherwise.

    The structure's module is vLLM's or a trainer's copy, and is not checked.
    """
    if len(content) > _LONGEST:
        raise _refusal(f"it has {len(content)} bytes")
    try:
        opcodes = _with_whole_names(content)
    except ValueError as error:
        raise _refusal(f"{error}") from error
    match opcodes:
        case [
            ("GLOBAL", "_ctypes _unpickle"),
            ("GLOBAL", str(structure)),
            ("EMPTY_DICT", _),
            ("SHORT_BINBYTES" | "BINBYTES", bytes(unique_id)),
            ("TUPLE2", _),
            ("TUPLE2", _),
            ("REDUCE", _),
            ("STOP", _),
        ] if structure.endswith(" ncclUniqueId"):
            if len(unique_id) != BYTES:
                raise _refusal(f"the id has {len(unique_id)} bytes, not {BYTES}")
            return unique_id
    raise _refusal("it is another object")


def _with_whole_names(content: bytes) -> list[tuple[str, Any]]:
    """Return opcodes and arguments, each global as one opcode, like in older protocols.

    Raise ``ValueError`` if ``content`` is no pickle.
    """
    opcodes: list[tuple[str, Any]] = []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _BESIDE_THE_POINT:
            continue
        if opcode.name == "STACK_GLOBAL":
            match opcodes[-2:]:
                case [(first, module), (second, name)] if {first, second} <= _TEXTS:
                    opcodes[-2:] = [("GLOBAL", f"{module} {name}")]
                    continue
            raise ValueError("it names a global without text")
        opcodes.append((opcode.name, argument))
    return opcodes


def _refusal(reason: str) -> Refused:
    return Refused(f"the trainer's NCCL id is no pickled ncclUniqueId: {reason}")
