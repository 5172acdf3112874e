"""Compares a head tied to the embeddings with these embeddings."""

from __future__ import annotations

import torch

from sglang_inflight.scheduler.update.checks.digest import Digest
from sglang_inflight.vocabulary.errors import Refused

_HEADS = ("lm_head.weight",)
# in this order: Llama and most others, GPT-2, Bloom and ChatGLM, Llama's own checkpoints
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)


class TiedHead:
    """Compares an update's head with the same update's embeddings.

    A checkpoint of such a model has the embeddings alone, but a trainer's ``state_dict()`` has
    both names. The model's loader skips the head. In a pipeline the last stage loads the head, and
    the first stage the embeddings. So both must be equal. One object serves one update of one
    model, on the staging thread.
    """

    def __init__(self) -> None:
        self._head: tuple[str, str] | None = None
        self._embeddings: str | None = None

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith(_HEADS):
            self._head = name, _digest_of(tensor)
        elif name.endswith(_EMBEDDINGS):
            self._embeddings = _digest_of(tensor)

    def refuse_if_not_the_embeddings(self) -> None:
        """Raise ``Refused`` if the update's head differs from its embeddings."""
        if self._head is None:
            return
        name, digest = self._head
        if self._embeddings is None:
            raise Refused(
                f"the model ties {name!r} to its embeddings, which were not sent: send the "
                "embeddings in the same update"
            )
        if digest != self._embeddings:
            raise Refused(
                f"the model ties {name!r} to its embeddings, and the update brings a head that "
                "differs from the embeddings of the update: send equal tensors, or no head"
            )


def is_head(name: str) -> bool:
    return name.endswith(_HEADS)


def _digest_of(tensor: torch.Tensor) -> str:
    digest = Digest()
    for _ in digest.read("", tensor):
        pass
    return digest.hexdigest()
