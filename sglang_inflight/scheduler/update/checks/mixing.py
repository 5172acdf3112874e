"""Finds what a loader makes of several elements of a sparse tensor.

Sparse tensors have NaN where nothing was sent (``sources/sparse.py``). A loader may move their
elements, and change each by itself. An element made of several is NaN if one of them was not sent,
and what was sent is lost. Or it is none, although nothing was sent. An element made of a weight may
be made of what is served already, for the second time. Memory with such elements is mixed: it may
reach no weight, and no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused, list_names

# operations that move elements, or make room for them
_MOVES = frozenset(
    (
        "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "empty_like",
        "fill_", "flip", "full_like", "gather", "index", "index_copy_", "index_select",
        "masked_fill", "masked_fill_", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "ones_like", "repeat", "roll", "stack", "zero_", "zeros_like",
    )
)  # fmt: skip
# operations that change each element by itself, and leave NaN as it is
_KEEPS_NAN = frozenset(
    (
        "_local_scalar_dense", "add", "add_", "div", "div_", "exp", "exp2", "mul", "mul_", "neg",
        "neg_", "rsub", "sub", "sub_",
    )
)  # fmt: skip


class Mixing:
    """Follows the operations of one call of a loader, for its ``Dataflow``."""

    def __init__(
        self, is_sent: Callable[[torch.Tensor], bool], is_weight: Callable[[torch.Tensor], bool]
    ) -> None:
        """``is_sent`` says whether received tensors are behind a tensor."""
        self._is_sent = is_sent
        self._is_weight = is_weight
        # both by ``memory_key``
        self._mixed: set[int] = set()
        self._copied_weights: set[int] = set()

    def mixes(self, func: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
        """Return whether an operation, about to run, gives mixed elements."""
        if any(memory_key(tensor) in self._mixed for tensor in read):
            return True
        name = func.overloadpacket.__name__
        if name in _MOVES:
            return any(map(self._is_sent, read)) and any(map(_holds_no_nan, written))
        if any(map(self._has_a_weight, (*written, *read))):
            return True
        sent = [tensor for tensor in (*written, *read) if self._is_sent(tensor)]
        return bool(sent) and not (len(sent) == 1 and name in _KEEPS_NAN)

    def follow(
        self, made: Iterable[torch.Tensor], read: list[torch.Tensor], *, mixes: bool
    ) -> None:
        """Note what an operation has made of ``read``. ``mixes`` is the method's answer."""
        has_a_weight = any(map(self._has_a_weight, read))
        is_sent = any(map(self._is_sent, read))
        for tensor in made:
            if mixes or (is_sent and _holds_no_nan(tensor)):
                self._mixed.add(memory_key(tensor))
            if has_a_weight:
                self._copied_weights.add(memory_key(tensor))

    def refuse_number(self, number: object, names: Iterable[str], *, mixes: bool) -> None:
        """Raise ``Refused`` if a ``number`` made of the tensors ``names`` may be another one."""
        if number is not None and (mixes or number != number):
            raise self.refusal(names)

    def forget(self, key: int) -> None:
        """Note that the memory of ``key`` has other contents."""
        self._mixed.discard(key)
        self._copied_weights.discard(key)

    @staticmethod
    def refusal(names: Iterable[str]) -> Refused:
        return Refused(
            f"load_format 'sparse': the model's loader computes with {list_names(sorted(names))}, "
            "and does not only move each element: send whole tensors"
        )

    def _has_a_weight(self, tensor: torch.Tensor) -> bool:
        return self._is_weight(tensor) or memory_key(tensor) in self._copied_weights


def _holds_no_nan(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.itemsize < 2
