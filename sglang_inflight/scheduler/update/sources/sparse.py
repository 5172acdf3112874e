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

    ``indices``: int32 or int64, and ``values``: as many floats, on any device.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]


def pair_up(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    said: Mapping[str, Sequence[int]],
) -> Iterator[Sparse]:
    """Yield the tensors that sparse ``weights`` are parts of, in memory of their own.

    Neither indices nor values were looked at: see ``find_largest`` and ``largest_in``.

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
        # the sender's memory may be written again before the other half comes, or the others
        both[kind] = tensor.clone()
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
    at = _named(name)
    if indices.dtype not in (torch.int32, torch.int64):
        raise Refused(f"{at}: indices are {indices.dtype}, not int32 or int64")
    if not values.is_floating_point() or values.itemsize < 2:
        raise Refused(f"{at}: values are {values.dtype}, not float16, bfloat16, float32 or float64")
    if indices.dim() != 1 or indices.shape != values.shape:
        raise Refused(
            f"{at}: {list(indices.shape)} indices and {list(values.shape)} values are not two "
            "rows of one length"
        )
    return Sparse(name, indices, values, shape)


def find_largest(sparse: Sparse) -> float:
    """Return the largest magnitude in ``sparse``.

    Raises ``Refused`` for NaN and infinity, and for indices out of range or not each once.
    """
    name, indices, values, shape = sparse
    at = _named(name)
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
    return largest


def largest_in(batch: Sequence[Sparse]) -> float | None:
    """Return the largest magnitude in different tensors, looked at together.

    Return None if ``find_largest`` has to look at each: a value or an index may be wrong, or
    indices are not in ascending order.
    """
    kinds: dict[tuple[object, ...], list[Sparse]] = {}
    for each in batch:
        kind = each.values.dtype, each.values.device, each.indices.device
        kinds.setdefault(kind, []).append(each)
    largest = 0.0
    for parts in kinds.values():
        indices = torch.cat([part.indices.to(torch.int64) for part in parts])
        device = indices.device
        lengths = torch.tensor([len(part.indices) for part in parts], device=device)
        number = torch.repeat_interleave(lengths, output_size=len(indices))
        counts = torch.tensor([torch.Size(part.shape).numel() for part in parts], device=device)
        is_outside = (indices < 0) | (indices >= counts[number])
        # each tensor's positions follow those of the tensor before
        key = indices + (counts.cumsum(0) - counts)[number]
        if bool(is_outside.any()) or not bool((key[1:] > key[:-1]).all()):
            return None
        most = largest_magnitude(torch.cat([part.values for part in parts]))
        if not math.isfinite(most):
            return None
        largest = max(largest, most)
    return largest


def _named(name: str) -> str:
    return f"sparse tensor {shorten(name)!r}"
