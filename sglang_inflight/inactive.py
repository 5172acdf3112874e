"""Servers running as SGLang ships them, without SGLang Inflight, and the reason.

All processes of a server must decide alike, so the launching process decides before it starts
the first child. A child loads plugins before it knows its arguments. The launching process tells
the child by an environment variable, and the child loads nothing of ours. In the launching
process our hooks are installed already: there they act only on objects of a ``Frontend``
(``hooking.with_us``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "SGLANG_INFLIGHT_INACTIVE"
# the reason, for tokenizer workers to answer on our routes: they load no plugins
OF_WORKERS = "SGLANG_INFLIGHT_INACTIVE_WORKERS"

# reason for the server launched last; SGLang's own globals are of that server, too
_why: str | None = None


def why_inactive() -> str | None:
    """Return why this process' server runs without us, or None if it runs with us."""
    return _why


def is_child_of_inactive() -> bool:
    """Return whether an inactive server started this process."""
    return VARIABLE in os.environ


@contextmanager
def launching(why: str | None) -> Iterator[None]:
    """Set the variable while a server's children start, and for no other child process."""
    begin(why)
    try:
        yield
    finally:
        children_have_started()


def begin(why: str | None) -> None:
    """Set the variable for children started before ``children_have_started``."""
    global _why
    _why = why
    children_have_started()
    if why is not None:
        os.environ[VARIABLE] = why


def children_have_started() -> None:
    os.environ.pop(VARIABLE, None)
