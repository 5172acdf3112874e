from __future__ import annotations

from sglang_inflight.messages import Call, RankAnswer


class Counted(RankAnswer, kw_only=True):
    queued: int
    launched: int


class CountCall(Call, kw_only=True):
    answer = Counted
