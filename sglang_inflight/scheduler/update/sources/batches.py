"""Which tensors a model's loader gets in one call.

Most loaders write a tensor before they ask for the next. Some gather all that they are given and
write it in another order, some hold one half of a fused parameter until the other half comes, and
both forget what they hold when the call ends. So a call must end before the sender writes to its
memory again, and it must not end amid a module.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

import torch

from sglang_inflight.scheduler.update.sources.weights import Weights

# What a source hands over at a time. The memory of a batch is the sender's again when the next
# batch is asked for.
Batches = Generator[Weights, None, None]
_Pair = tuple[str, torch.Tensor]

# What is copied at a time, but for the rest of a module.
MOST_BYTES = 512 << 20


def one_batch(weights: Weights) -> Batches:
    """All of ``weights``, which stay readable to the end, for one call."""
    with closing(weights):
        yield weights


def with_whole_modules(batches: Batches) -> Batches:
    """``batches``, but what begins a module that the next batch may go on with comes with that.

    For batches that lie in one buffer. Senders fill it up to its size and list modules one after
    the other, so its end may part the halves of a fused parameter. The tensors that are moved
    are copied, because the sender fills the buffer again. A module that has more than
    ``MOST_BYTES`` so far is not moved.
    """
    begun: list[_Pair] = []
    with closing(batches):
        for batch in batches:
            pairs = [*begun, *batch]
            end = _begin_of_last_module(pairs)
            begun = [(name, _copied(tensor)) for name, tensor in pairs[end:]]
            del pairs[end:], batch
            if pairs:
                yield (pair for pair in pairs)
            # the sender may want its memory back
            pairs.clear()
    if begun:
        yield (pair for pair in begun)


def _begin_of_last_module(pairs: list[_Pair]) -> int:
    """Its index in ``pairs``; their length where it is too large to be moved."""
    begin, nbytes = len(pairs), 0
    while begin and _module_of(pairs[begin - 1][0]) == _module_of(pairs[-1][0]):
        begin -= 1
        nbytes += _nbytes(pairs[begin][1])
    return begin if nbytes <= MOST_BYTES else len(pairs)


def in_parts(batch: Weights, most: float = MOST_BYTES) -> Iterator[list[_Pair]]:
    """Copies of the tensors of ``batch``, for several calls: at least one list, if it is empty.

    A list has ``most`` bytes and the rest of the module that goes beyond them.
    """
    part: list[_Pair] = []
    nbytes = 0
    for name, tensor in batch:
        if nbytes >= most and _module_of(name) != _module_of(part[-1][0]):
            yield part
            part, nbytes = [], 0
        part.append((name, _copied(tensor)))
        nbytes += _nbytes(tensor)
    yield part


def _module_of(name: object) -> str:
    """The module whose fused parameters a tensor may be a half of: ``a.b`` of ``a.b.c.weight``.

    A sender may name a tensor by what is no text, which the loader's checks refuse.
    """
    return str(name).rpartition(".")[0].rpartition(".")[0]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # a payload may hold something else, which the loader's checks refuse
    return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
