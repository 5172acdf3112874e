"""Make recorded answers of a run again, under the weights that the trainer has sent.

Each answer's commits come between the same tokens. So versions, KV and log-probabilities must be
those that the run had.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from examples.async_grpo.labels import TOLERANCE
from examples.async_grpo.model import CONFIG, Weights
from sglang_inflight.extensions.replay.examine import examine
from sglang_inflight.extensions.replay.play import Stage
from sglang_inflight.extensions.replay.rollout import Rollout, read_rollout


@dataclass(frozen=True)
class Replayed:
    """How many rollouts were made again, and how many were equal.

    ``furthest`` is the largest distance of a log-probability, in nats. ``different`` says what was
    different, for each rollout that was not equal.
    """

    rollouts: int
    equal: int
    commits: int
    furthest: float
    different: list[str]


def replay(
    url: str, recorded: Sequence[dict[str, Any]], versions: Mapping[int, Weights]
) -> Replayed:
    """Make ``recorded`` answers again on the server, which must be idle."""
    rollouts = [
        read_rollout(each["answer"], each["request"], f"answer {number}")
        for number, each in enumerate(recorded)
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: str(_write(Path(folder) / name, versions[int(name)])) for name in _named(rollouts)
        }
        with Stage(url, paths) as stage:
            verdicts = [examine(stage, each, [], TOLERANCE).verdict for each in rollouts]
    return Replayed(
        len(verdicts),
        sum(verdict.is_equal for verdict in verdicts),
        sum(verdict.commits for verdict in verdicts),
        max((v.largest.nats for v in verdicts if v.largest is not None), default=0.0),
        [f"{verdict.name}: {verdict}" for verdict in verdicts if not verdict.is_equal],
    )


def _named(rollouts: Sequence[Rollout]) -> set[str]:
    """Return the versions of all weights and of all KV."""
    return {
        name
        for rollout in rollouts
        for name in (
            *(version for version, _ in rollout.record.weights.values()),
            *(version for version, _, _ in rollout.prefix),
        )
    }


def _write(folder: Path, weights: Weights) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
