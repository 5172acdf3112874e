"""Faults in a server's ranks: the test's end of ``tests/faults``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Literal

from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour

# the last five can only raise: a commit's flush, when the weights are swapped, and, which are
# no phases of an update, SGLang's handler of /slow_down, the copy of memory that is to go, its
# going, and a tokenizer worker that hears news
Phase = Literal["first", "middle", "vote", "flush", "handler", "copy", "saver", "news"]
# "hang" looks whether its update was dropped, "hang_deaf" does not
Kind = Literal["raise", "hang", "hang_deaf", "wrong_tensor"]

# Where the servers look, for the whole test session: they are told once, at their start.
_FILE = Path(tempfile.mkdtemp(prefix="inflight-faults-")) / "fault.json"

# longer than busy cores take for a broadcast, as short as a test can wait for one that fails
GROUP_TIMEOUT_S = 10

ENV = with_plugin("faults") | {
    "INFLIGHT_TEST_FAULT": str(_FILE),
    "SGLANG_INFLIGHT_GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S),
}
_FLAGS = ("--weight-version", "v0")

FLAVOURS["faulty_server"] = Flavour(_FLAGS, ENV)
FLAVOURS["tp2_server"] = Flavour((*_FLAGS, "--tp-size", "2"), ENV)
FLAVOURS["dp2_server"] = Flavour((*_FLAGS, "--dp-size", "2"), ENV)
FLAVOURS["tp2_off_server"] = Flavour(
    (*_FLAGS, "--tp-size", "2"), ENV | {"SGLANG_INFLIGHT_STAGING": "off"}
)


class Faults:
    """At most one fault at a time; it stays until it is cleared."""

    def inject(
        self, phase: Phase, kind: Kind, *, rank: int | None = None, pid: int | None = None
    ) -> None:
        """``rank`` counts all ranks of all replicas; None means each of them, or each process."""
        # ranks read it while it is written: they must see all of it or nothing
        draft = _FILE.with_suffix(".draft")
        draft.write_text(json.dumps({"phase": phase, "kind": kind, "rank": rank, "pid": pid}))
        draft.replace(_FILE)

    def clear(self) -> None:
        _FILE.unlink(missing_ok=True)
