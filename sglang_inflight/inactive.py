"""Why a server runs without us: it is as SGLang ships it, and asks for what we cannot do.

It is decided where the server is launched, before its first child process starts, because
all its processes must decide alike. A child loads plugins before it knows its arguments, so
it is told by the environment that it inherits, and then loads nothing of ours. The launching
process has loaded us by then: there our hooks leave whatever belongs to no ``Frontend`` alone
(``frontend/hook_guard.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "SGLANG_INFLIGHT_INACTIVE"
# for tokenizer workers, which load no plugins: it says why on our routes
OF_WORKERS = "SGLANG_INFLIGHT_INACTIVE_WORKERS"

# of the server that this process launched last, as what SGLang publishes in it is
_why: str | None = None


def why_inactive() -> str | None:
    """Why the server of this launching process runs without us; None where it runs with us."""
    return _why


def is_child_of_inactive() -> bool:
    """Whether this process was started by a server that runs without us."""
    return VARIABLE in os.environ


@contextmanager
def launching(why: str | None) -> Iterator[None]:
    """Around the start of a server's children. What else this process starts is told nothing."""
    begin(why)
    try:
        yield
    finally:
        children_have_started()


def begin(why: str | None) -> None:
    """Children that are started from here on are told, until ``children_have_started``."""
    global _why
    _why = why
    children_have_started()
    if why is not None:
        os.environ[VARIABLE] = why


def children_have_started() -> None:
    os.environ.pop(VARIABLE, None)
