"""Scripts: prefills and pauses that a repeated request must go through. Imports no SGLang.

A position is a number of tokens that launched forwards have computed, as in a trail
(``extensions/trails/trails.py``).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_Whole = Annotated[int, msgspec.Meta(ge=0)]


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """Prefills and pauses of one request, each list in its order."""

    # positions that each prefill of the request computes: from the first number to the second
    prefills: list[tuple[_Whole, _Whole]] = []
    # number of retractions so far, and the position at which all generation pauses
    pauses: list[tuple[_Whole, _Whole]] = []


def read_script(value: Any) -> Script:
    """Raises ``ValueError`` for anything but a script."""
    try:
        return msgspec.convert(value, Script)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
