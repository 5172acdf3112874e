"""The layout of a call's tensors: their names, dtypes and shapes, in their order; and its digest.

A call may name a layout by its digest once a server keeps it. Both sides compute the digest from
the layout itself, so a digest stands for no other layout. Imports no SGLang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

LayoutDigest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

# Most tensors in lists of a message: the scheduler's thread decodes it, and may read their layout,
# in a few ms. More tensors go in parts.
MOST_LISTED = 2048
# tensors in a part; a staging thread decodes a part in some 0.1 ms
_LINES = 256

_encoder = msgspec.json.Encoder()


def layout_parts(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Iterator[bytes]:
    """Yield the layout as lines of JSON: ``["NAME","DTYPE",[SIZE,SIZE]]`` for each tensor.

    The lines are UTF-8 without spaces, each ends with a newline, and a part has ``_LINES`` of them.
    Raises ``ValueError`` if the arguments differ in length.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"names, dtypes and shapes must be of one length, not {len(names)}, "
            f"{len(dtypes)} and {len(shapes)}"
        )
    for at in range(0, len(names), _LINES):
        rows = zip(*(each[at : at + _LINES] for each in (names, dtypes, shapes)), strict=True)
        yield _encoder.encode_lines([*rows])


def layout_digest(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> str:
    """Return the SHA-256 of the layout's lines (``layout_parts``), in hexadecimal."""
    return digest_of_parts(layout_parts(names, dtypes, shapes))


def digest_of_parts(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
