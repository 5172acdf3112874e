"""Makes a rollout again, and reports how it compares, also with other log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_inflight.client.spans import names_by_token
from sglang_inflight.extensions.replay.compare import Mismatch, Verdict, compare, mismatch
from sglang_inflight.extensions.replay.play import Stage
from sglang_inflight.extensions.replay.rollout import Rollout
from sglang_inflight.vocabulary.errors import Refused


class Report:
    """The verdict on one rollout, and its mismatches with other log probabilities."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.mismatches: dict[str, list[Mismatch]] = {}
        self.logprobs: dict[str, list[float]] = {}

    def add(self, name: str, rollout: Rollout, logprobs: list[float]) -> None:
        """Compare ``logprobs`` of the rollout's tokens with those recorded."""
        if rollout.logprobs is None:
            raise Refused(f"{rollout.name} has no log probabilities: ask for return_logprob")
        self.logprobs[name] = logprobs
        versions = names_by_token(rollout.made_by)
        self.mismatches[name] = mismatch(versions, rollout.logprobs, logprobs)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.verdict),
            "largest": self.verdict.largest and self.verdict.largest._asdict(),
            "equal": self.verdict.is_equal,
            "exact": self.verdict.is_exact,
            "mismatch": {
                name: [each._asdict() for each in of] for name, of in self.mismatches.items()
            },
            "logprobs": self.logprobs,
        }


def examine(stage: Stage, rollout: Rollout, under: Sequence[str], tolerance: float) -> Report:
    """Make ``rollout`` again on ``stage``, and compare, also with other versions' numbers."""
    record = rollout.record
    stage.require([*(version for version, _ in record.weights.values()), *under])
    played = stage.play(rollout, forces=not record.samples_alike)
    forced = None
    if played.tokens != rollout.tokens:
        forced = stage.play(rollout, forces=True)
    report = Report(compare(rollout, played, forced, tolerance))
    for version in under:
        report.add(version, rollout, stage.under(rollout, version).logprobs)
    return report
