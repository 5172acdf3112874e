"""Sparse tensors: positions in a checkpoint's tensor, and the values there.

``NAME.indices`` (int32 or int64, one dimension, flat positions, each once) and ``NAME.values`` (a
float dtype, as many) stand for the tensor NAME. Its load plan says where the elements go. A tensor
without one has to come whole instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from sglang_inflight.scheduler.update.checks.coverage import largest_magnitude
from sglang_inflight.vocabulary.errors import Refused, shorten
from sglang_inflight.vocabulary.sparse import INDICES, VALUES

_OTHER = {INDICES: VALUES, VALUES: INDICES}


class Sparse(NamedTuple):
    """Some elements of the tensor ``name`` of a checkpoint.

    ``indices``: int32 or int64, each once. ``values``: as many floats, on any device. ``largest``:
    the largest magnitude in them.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]
    largest: float


def pair_up(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    said: Mapping[str, Sequence[int]],
) -> Iterator[Sparse]:
    """Yield the tensors that sparse ``weights`` are parts of.

    ``shapes``: of the tensors of the served checkpoint. ``said``: the shapes of some of them, as
    the sender gives them. Indices and values of a tensor may come in either order. Raises
    ``Refused`` with the tensor's name if one is missing, comes twice, or does not fit.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    whole: set[str] = set()
    for name, tensor in weights:
        if not isinstance(tensor, torch.Tensor):
            raise _not_sparse(name)
        base, kind = _split(name)
        if base not in shapes:
            raise Refused(
                f"sparse tensor {shorten(base)!r}: the served checkpoint has no tensor of this "
                "name, or is not on this machine. Its shape is needed: send whole tensors"
            )
        if tuple(said.get(base, shapes[base])) != shapes[base]:
            raise Refused(
                f"sparse tensor {shorten(base)!r}: the whole tensor has shape {list(said[base])}; "
                f"the model's has {list(shapes[base])}"
            )
        both = halves.setdefault(base, {})
        if kind in both or base in whole:
            raise Refused(f"sparse tensor {shorten(base)!r} came twice in one call")
        # the sender's memory may be written again before the other half comes
        both[kind] = tensor.clone() if len(both) == 0 else tensor
        if len(both) == 2:
            del halves[base]
            whole.add(base)
            yield _checked(base, both[INDICES], both[VALUES], shapes[base])
    for base, both in halves.items():
        raise _lacks(base, _OTHER[next(iter(both))], "the same call")


def refuse_halves(names: Set[str], where: str) -> None:
    """Raise ``Refused`` for a tensor with one of its halves among ``names``, or none.

    ``where`` says in the error whose names they are.
    """
    for name in sorted(names):
        base, kind = _split(name)
        if base + _OTHER[kind] not in names:
            raise _lacks(base, _OTHER[kind], where)


def _split(name: object) -> tuple[str, str]:
    if isinstance(name, str):
        for kind in INDICES, VALUES:
            if name.endswith(kind):
                return name.removesuffix(kind), kind
    raise _not_sparse(name)


def _not_sparse(name: object) -> Refused:
    return Refused(
        f"load_format 'sparse' takes tensors named NAME{INDICES} and NAME{VALUES}, "
        f"got {shorten(str(name))!r}"
    )


def _lacks(base: str, half: str, where: str) -> Refused:
    return Refused(f"sparse tensor {shorten(base)!r} lacks {shorten(base) + half!r} in {where}")


def _checked(
    name: str, indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]
) -> Sparse:
    at = f"sparse tensor {shorten(name)!r}"
    if indices.dtype not in (torch.int32, torch.int64):
        raise Refused(f"{at}: indices are {indices.dtype}, not int32 or int64")
    if not values.is_floating_point() or values.itemsize < 2:
        raise Refused(f"{at}: values are {values.dtype}, not float16, bfloat16, float32 or float64")
    if indices.dim() != 1 or indices.shape != values.shape:
        raise Refused(
            f"{at}: {list(indices.shape)} indices and {list(values.shape)} values are not two "
            "rows of one length"
        )
    largest = largest_magnitude(values)
    if not math.isfinite(largest):
        raise Refused(f"{at}: values hold NaN or infinity")
    count = torch.Size(shape).numel()
    if len(indices):
        low, high = (int(end) for end in torch.aminmax(indices))
        if low < 0 or high >= count:
            raise Refused(
                f"{at}: index {low if low < 0 else high} is out of range: the tensor has "
                f"{count} elements"
            )
        # senders list them in ascending order, as a rule
        if not bool((indices[1:] > indices[:-1]).all()):
            ordered = indices.sort().values
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if len(twice):
                raise Refused(f"{at}: index {int(twice[0])} comes twice")
    return Sparse(name, indices, values, shape, largest)
