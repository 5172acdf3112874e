"""Messages of releases between the front end and the ranks."""

from __future__ import annotations

from typing import ClassVar

from sglang_inflight.messages import Call, Changed, Done
from sglang_inflight.vocabulary.bodies import KeepWeights


class Moved(Changed, kw_only=True):
    """Memory was released or resumed."""

    # bytes by kind of memory, and of "shadow"
    bytes: dict[str, int]
    seconds: float


class PrepareReleaseCall(Call, kw_only=True):
    """Phase one of a release: check whether it is possible, copy the kept contents, and vote.

    From its vote on the rank makes no step, until the memory is resumed or
    ``CancelReleaseCall`` arrives.
    """

    answer = Done
    at_boundary: ClassVar[bool] = True

    tags: list[str]
    # None: the server's start decides
    keep_weights: KeepWeights | None


class ReleaseCall(Call, kw_only=True):
    """Phase two: release the memory. All ranks have voted for it."""

    answer = Moved
    at_boundary: ClassVar[bool] = True


class CancelReleaseCall(Call, kw_only=True):
    """Cancel a prepared release, because a rank voted against it."""

    answer = Done
    at_boundary: ClassVar[bool] = True


class PrepareResumeCall(Call, kw_only=True):
    """Phase one of a resume: check that the memory was released and that it fits."""

    answer = Done
    at_boundary: ClassVar[bool] = True

    tags: list[str]


class ResumeCall(Call, kw_only=True):
    """Phase two of a resume. Generation continues once all memory is back."""

    answer = Moved
    at_boundary: ClassVar[bool] = True

    tags: list[str]
    # while weights are hollow: hold requests back instead of aborting them
    until_filled: bool = False
