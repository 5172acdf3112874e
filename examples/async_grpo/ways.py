"""Five ways to give a new version to a server that answers a trainer's questions.

With ``blocking`` trainer and server take turns, as in synchronous GRPO. The server answers one
step's questions. When the last answer has come, the trainer makes its step and sends its weights.
Then it asks the next questions. So all samples are of the newest version, no request meets an
update, and the server waits for the trainer as the trainer waits for the longest answer.

With each other way the server always has questions to answer, and the trainer makes a step of the
groups that are finished. The ways differ in what an update does to running requests:

- ``abort``: a pause ends them, and each is asked again from its prompt. Their tokens are lost.
- ``retract``: a pause stops them. Their tokens are kept, and their KV is computed anew.
- ``in flight``: they go on while the weights are staged, and keep their KV at the commit.
- ``in flight, sparse``: the same, and the sender sends only the elements that changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, Unpack

import torch

from sglang_inflight.client import Client, Session
from sglang_inflight.client.fields import SessionFields
from sglang_inflight.vocabulary.answers import PauseMode


class Sends(Protocol):
    """A ``Sender``, or a ``ShardSender`` of a trainer's rank 0."""

    def send(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        weight_version: str,
        **fields: Unpack[SessionFields],
    ) -> Session | None: ...


@dataclass(frozen=True)
class Way:
    """``pause`` is the mode of a pause around each transfer, or None without one.

    With ``takes_turns`` no question is asked before the update that the last answers led to.
    """

    name: str
    summary: str
    pause: PauseMode | None = None
    takes_turns: bool = False
    sparse: bool = False
    # fields of the update that say which KV of older weights it keeps; by default the server's own
    kept_kv: SessionFields = field(default_factory=lambda: SessionFields())

    @property
    def recomputes(self) -> bool:
        """Whether a running request's KV is of the newest version after each update."""
        return self.pause == "retract"

    def update(
        self,
        client: Client,
        sender: Sends,
        weights: Mapping[str, torch.Tensor],
        version: int,
    ) -> Session:
        """Send ``weights``, and return when they are served."""
        paused: AbstractContextManager[object] = (
            nullcontext() if self.pause is None else client.paused(self.pause)
        )
        with paused:
            receipt = sender.send(weights.items(), weight_version=str(version), **self.kept_kv)
        # rank 0 of a trainer always has one
        assert receipt is not None
        return receipt


def keeping_kv(most: int | None) -> Way:
    """Return the way in flight that keeps KV up to an age, in commits; None for any age."""
    if most is None:
        return Way("in flight, KV of any age", "KV is kept", kept_kv={"kv_cache": "keep"})
    return Way(
        f"in flight, KV up to {most}",
        f"KV is kept until it is {most} versions old, for later requests too",
        kept_kv={"kv_max_age": most},
    )


WAYS = (
    Way("blocking", "trainer and server take turns", takes_turns=True),
    Way("abort", "running requests end, and are asked again", pause="abort"),
    Way("retract", "running requests stop, and their KV is computed anew", pause="retract"),
    Way("in flight", "running requests go on"),
    Way("in flight, sparse", "running requests go on, and changes are sent", sparse=True),
)
