"""NCCL's id of a group, in the form in which vLLM's trainers leave it in their store."""

from __future__ import annotations

import pickletools
from typing import Any

from sglang_inflight.errors import Refused

# of ncclGetUniqueId
BYTES = 128
# many times what pickling one takes
_LONGEST = 2048

# they keep what was made for later use, which nothing here is
_BESIDE_THE_POINT = frozenset(
    {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"},
)
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})


def read_unique_id(content: bytes) -> bytes:
    """The id in a pickled ``ncclUniqueId``, which is a structure of ``ctypes``.

    ``content`` is whatever somebody on the network has put there, and unpickling it would run
    it. So no object is made of it: its opcodes must be those that pickling such a structure
    gives, one after the other, and of what they name nothing is imported. Raises ``Refused``.

    The structure's module is vLLM's, or that of a copy in a trainer, and makes no difference.
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
    """Opcodes and their arguments, and each global in one, as older protocols have it.

    Raises ``ValueError`` where it is no pickle.
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
            raise ValueError("it names something by no text")
        opcodes.append((opcode.name, argument))
    return opcodes


def _refusal(reason: str) -> Refused:
    return Refused(f"what the trainer left as its NCCL id is no pickled ncclUniqueId: {reason}")
