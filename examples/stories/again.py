"""Tell a recorded story again, with the commits between the same tokens, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from examples.stories.checks import Check
from examples.stories.streams import Story
from sglang_inflight.extensions.replay.compare import compare, mismatch
from sglang_inflight.extensions.replay.play import Stage
from sglang_inflight.extensions.replay.rollout import read_rollout
from sglang_inflight.vocabulary.errors import InflightError

# How much farther the same tokens are under one version alone. The story was told beside three
# others, and products of matrices in bfloat16 depend on the number of rows in their last bits.
FARTHER = 4.0


def check_again(url: str, story: Story, checkpoints: Mapping[str, Path]) -> Check:
    """Repeat ``story`` on the server, and once more under its first version alone.

    The repetition has the story's tokens, because their sampling had no seed. So their log
    probabilities show which weights made them.
    """
    claim = f"{story.title!r} is the same again, with its commits between the same tokens"
    paths = {version: str(folder) for version, folder in checkpoints.items()}
    answer = {
        "output_ids": story.ids,
        "meta_info": {**story.meta, "output_token_logprobs": story.logprobs},
    }
    try:
        rollout = read_rollout(answer, {"input_ids": story.prompt_ids}, story.title)
        with Stage(url, paths) as stage:
            again = stage.play(rollout, forces=True)
            alone = stage.under(rollout, rollout.made_by[0].version)
    except InflightError as error:
        return Check(claim, holds=False, detail=str(error))
    # commits and digests were as recorded, and each token and its KV have the same versions
    verdict = compare(rollout, again, None, float("inf"))
    assert rollout.logprobs is not None
    together = [story.title] * verdict.tokens
    near, far = (
        mismatch(together, rollout.logprobs, played.logprobs)[0].mean for played in (again, alone)
    )
    detail = f"{verdict.tokens} tokens, {verdict.commits} commits; {near:.1g} nats apart"
    return Check(
        claim,
        holds=verdict.is_equal and verdict.commits > 0 and FARTHER * near <= far,
        detail=f"{detail}, and {far:.1g} under {alone.made_by[0].version} alone"
        if verdict.is_equal
        else str(verdict),
    )
