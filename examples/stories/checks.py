"""Check the streams and the updates, whoever made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from examples.stories.streams import Story
from examples.stories.styles import Style
from examples.stories.updating import Update, UpdateResult
from examples.stories.weights import changes_between, checkpoint_bytes, count_changes
from sglang_inflight.client import cover_exactly, in_order

Decode = Callable[[list[int]], str]

# a story needs about a sentence to take up the new style
GRACE_TOKENS = 40


class Check(NamedTuple):
    """One check. ``detail`` is the measured value, or the fault."""

    claim: str
    holds: bool
    detail: str


def check_all(
    stories: Sequence[Story],
    results: Sequence[UpdateResult],
    *,
    base_version: str,
    tokens: int,
    decode: Decode,
) -> list[Check]:
    updates = [result.update for result in results]
    versions = [base_version, *(update.version for update in updates)]
    return [
        *(_succeeded(result) for result in results),
        _same_by_every_way(results),
        *(check for result in results for check in _patched(result)),
        _whole(stories, tokens),
        _accounted_for(stories),
        _ordered(stories, versions),
        _all_seen(stories, versions),
        *_styled(stories, updates, base_version, decode),
    ]


def _succeeded(result: UpdateResult) -> Check:
    update, receipt = result.update, result.receipt
    ranks = receipt.get("ranks") or []
    failed = [rank for rank in ranks if not rank["success"]]
    named = receipt.get("weight_version") == update.version
    return Check(
        f"update {update.name} to {update.version} succeeded on every rank",
        bool(receipt["success"] and ranks and not failed and named),
        f"{len(ranks) - len(failed)} of {len(ranks)} ranks"
        if receipt["success"]
        else receipt["message"],
    )


def _same_by_every_way(results: Sequence[UpdateResult]) -> Check:
    """Compare the ranks' digests of their served weights, which show a missing tensor."""
    digests: dict[Path, set[tuple[str | None, ...]]] = {}
    for result in results:
        served = tuple(rank.get("digest") for rank in result.receipt.get("ranks") or [])
        digests.setdefault(result.update.checkpoint, set()).add(served)
    problems = [
        f"{checkpoint.name}: {different}"
        for checkpoint, different in digests.items()
        if len(different) > 1 or () in different
    ]
    claim = "a checkpoint has the same digest, whichever way it came"
    return _without(problems, claim, f"{len(digests)} checkpoints, {len(results)} updates")


def _patched(result: UpdateResult) -> Iterator[Check]:
    """Compare the receipt of a patch with the checkpoints. A failed update has no such receipt."""
    update, staged_as = result.update, result.receipt.get("staged_as")
    if update.patches is None or staged_as is None:
        return
    differ = count_changes(changes_between(update.patches, update.checkpoint))
    changed, peak = staged_as["changed_elements"], staged_as["staging_bytes_peak"]
    copy = checkpoint_bytes(update.checkpoint)
    yield Check(
        f"{update.version} changed the elements in which the checkpoints differ, and no other",
        changed == differ,
        f"{changed:,} changed, {differ:,} differ",
    )
    yield Check(
        f"staging {update.version} took less memory than a second copy of the weights",
        0 < peak < copy,
        f"{peak / 1e6:.0f} of {copy / 1e6:.0f} MB",
    )


def _whole(stories: Sequence[Story], tokens: int) -> Check:
    problems = [
        f"{story.title!r}: {story.error or f'{len(story.ids)} tokens, {story.finish_reason}'}"
        for story in stories
        if story.error
        or len(story.ids) != tokens
        or (story.finish_reason or {}).get("type") != "length"
    ]
    return _without(problems, f"every story has exactly {tokens} tokens", f"{len(stories)} stories")


def _accounted_for(stories: Sequence[Story]) -> Check:
    problems = [
        f"{story.title!r}: {list(story.spans)} over {len(story.ids)} tokens"
        for story in stories
        if not cover_exactly(story.spans, len(story.ids))
    ]
    spans = sum(len(story.spans) for story in stories)
    return _without(problems, "every token has its version", f"{spans} spans")


def _ordered(stories: Sequence[Story], versions: Sequence[str]) -> Check:
    problems = [
        f"{story.title!r}: {[span.version for span in story.spans]}"
        for story in stories
        if not in_order(story.spans, versions)
    ]
    return _without(problems, "no story goes back to an older version", " → ".join(versions))


def _all_seen(stories: Sequence[Story], versions: Sequence[str]) -> Check:
    seen = {span.version for story in stories for span in story.spans}
    problems = [f"{version} made no token" for version in versions if version not in seen]
    return _without(problems, "every version made a part of a story", ", ".join(sorted(seen)))


def _styled(
    stories: Sequence[Story], updates: Sequence[Update], base_version: str, decode: Decode
) -> list[Check]:
    """Measure each version's style. The base has none, so the measure discriminates."""
    checks = [
        _in_style(_text_of(stories, update.version, decode), update.version, update.style)
        for update in updates
    ]
    prose = _text_of(stories, base_version, decode)
    shares = {update.style.name: update.style.share(prose) for update in updates}
    none_fits = not any(update.style.fits(prose) for update in updates)
    detail = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return [Check(f"{base_version} writes in neither style", none_fits, detail), *checks]


def _in_style(text: str, version: str, style: Style) -> Check:
    detail = f"{style.share(text):.0%}, {style.enough:.0%} is enough"
    return Check(f"{version} writes in {style.name} style", style.fits(text), detail)


def _text_of(stories: Sequence[Story], version: str, decode: Decode) -> str:
    return "\n".join(
        decode(story.ids[span.start + (GRACE_TOKENS if span.start else 0) : span.end])
        for story in stories
        for span in story.spans
        if span.version == version
    )


def _without(problems: Sequence[str], claim: str, otherwise: str) -> Check:
    return Check(claim, not problems, "; ".join(problems) or otherwise)
