"""Makes a recorded rollout again, with its commits at the same tokens, and compares."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import boolean, read, setting

# a field of a request's ``custom_params``: what it must go through
SCRIPT = "replay"
# the pause that a script takes
PAUSE_ID = "replay"
SETTING = "SGLANG_INFLIGHT_REPLAY"


@dataclass(frozen=True)
class ReplaySettings:
    replay: bool = setting(
        False,
        boolean,
        "let a request say where all generation pauses, for `sglang-inflight replay`",
    )


EXTENSION = Extension(
    name="replay",
    modules=(
        "sglang_inflight.extensions.replay.checks",
        "sglang_inflight.extensions.replay.follow",
    ),
    settings=ReplaySettings,
    takes=(SCRIPT,),
    requires=("trails",),
    commands={"replay": "sglang_inflight.extensions.replay.command:replay"},
    is_on=lambda: read(ReplaySettings).replay,
)
