"""Faults in a server's ranks: the test's side of the plugin in ``tests/faults``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Literal

from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour

# these can only raise: a commit's flush after the swap; and, outside updates, SGLang's handler of
# /slow_down, the copy of memory before its release, the release, and a tokenizer worker's handling
# of a state. The last two, a write to a saved file and the sending of an offered weight, hear of no
# drop
Phase = Literal[
    "first", "middle", "vote", "flush", "handler", "copy", "saver", "news", "write", "send"
]
# "hang" checks whether the update was dropped, "hang_deaf" does not
Kind = Literal["raise", "hang", "hang_deaf", "wrong_tensor"]

# one path for the whole test session: servers learn it at their start only
_FILE = Path(tempfile.mkdtemp(prefix="inflight-faults-")) / "fault.json"

_REACHED = _FILE.with_name(_FILE.name + ".reached")

# longer than busy cores need for a broadcast, short enough to wait for in a test
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
    """Injects one fault at a time, until it is cleared."""

    def inject(
        self, phase: Phase, kind: Kind, *, rank: int | None = None, pid: int | None = None
    ) -> None:
        """Inject a fault into one rank or process, or all. ``rank`` counts over all replicas."""
        # ranks read the file at any time, so its content must appear at once
        _REACHED.unlink(missing_ok=True)
        draft = _FILE.with_suffix(".draft")
        draft.write_text(json.dumps({"phase": phase, "kind": kind, "rank": rank, "pid": pid}))
        draft.replace(_FILE)

    def is_reached(self) -> bool:
        """Return whether a rank hangs, or has hung, since the fault was injected."""
        return _REACHED.exists()

    def clear(self) -> None:
        _FILE.unlink(missing_ok=True)
