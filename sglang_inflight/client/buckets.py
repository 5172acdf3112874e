"""Flatten many tensors into one, to save the fixed cost of a broadcast for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.client.changes import Change, require_whole
from sglang_inflight.tensor_digest import digests
from sglang_inflight.vocabulary.bodies import FLATTENED_BUCKET, SPARSE_BUCKET
from sglang_inflight.vocabulary.layouts import layout_digest

if TYPE_CHECKING:
    import torch

    from sglang_inflight.client.changes import NamedTensor


# Fewest tensors in a layout that servers keep. Buckets of large tensors have few, and there are
# thousands of such buckets.
FEWEST_KEPT = 128


class Piece(NamedTuple):
    """The tensors of one call, and its ``load_format``."""

    load_format: str
    tensors: list[NamedTensor]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Piece:
        """Raises ``TypeError`` for a non-tensor, and for a shard of a tensor."""
        require_whole(name, tensor)
        return cls(FLATTENED_BUCKET, [(name, tensor)])

    @classmethod
    def sparse(cls, name: str, change: Change) -> Piece:
        return cls(SPARSE_BUCKET, change.named(name))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)


@dataclass(frozen=True)
class Bucket:
    """Named tensors, concatenated as bytes in ``flat``."""

    load_format: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor
    # a tensor's name -> its digest before it was flattened; None if nobody asked for digests
    digests: dict[str, str] | None

    @property
    def layout_digest(self) -> str | None:
        """Digest of the layout, if it is worth to be kept: it is long, and may come again."""
        if self.load_format != FLATTENED_BUCKET or len(self.names) < FEWEST_KEPT:
            return None
        return layout_digest(self.names, self.dtypes, self.shapes)

    def describe(self) -> dict[str, object]:
        """Return the bucket's fields of an update's body."""
        return {
            "layout_digest": self.layout_digest,
            "names": self.names,
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "load_format": self.load_format,
            "expected_digests": self.digests,
        }


def fill_buckets(
    pieces: Iterable[Piece],
    most_bytes: int,
    device: torch.device | str,
    *,
    with_digests: bool = False,
) -> Iterator[Bucket]:
    """Yield buckets on ``device`` of at most ``most_bytes``, or of one larger piece.

    ``pieces`` may be a generator: a piece is held only until its bucket is filled. A bucket has
    one ``load_format``, and buckets of all formats together hold at most ``most_bytes``. Digests
    are computed on the way into a bucket, from the tensors where they are.
    """
    held: dict[str, list[NamedTensor]] = {}
    size = 0
    for piece in pieces:
        nbytes = piece.nbytes
        if held and size + nbytes > most_bytes:
            yield from _flatten_all(held, device, with_digests)
            size = 0
        held.setdefault(piece.load_format, []).extend(piece.tensors)
        size += nbytes
    yield from _flatten_all(held, device, with_digests)


def _flatten_all(
    held: dict[str, list[NamedTensor]], device: torch.device | str, with_digests: bool
) -> Iterator[Bucket]:
    while held:
        load_format, tensors = held.popitem()
        expected = digests(tensors) if with_digests else None
        yield _flatten(load_format, tensors, device, expected)


def _flatten(
    load_format: str,
    tensors: list[NamedTensor],
    device: torch.device | str,
    expected: dict[str, str] | None,
) -> Bucket:
    # the receiver cannot view a tensor at an offset within an element: larger elements come first
    tensors.sort(key=lambda pair: -pair[1].itemsize)
    of_dtypes = {tensor.dtype for _, tensor in tensors}
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in of_dtypes}
    return Bucket(
        load_format,
        [name for name, _ in tensors],
        [names[tensor.dtype] for _, tensor in tensors],
        [list(tensor.shape) for _, tensor in tensors],
        _in_a_row([tensor for _, tensor in tensors], device),
        expected,
    )


def _in_a_row(tensors: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Return the bytes of ``tensors`` in one tensor on ``device``.

    Torch is called once for many tensors. Each of them would cost several calls.
    """
    import torch

    with torch.no_grad():
        if len(tensors) == 1:
            return tensors[0].contiguous().flatten().view(torch.uint8).to(device)
        forms = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(forms) == 1 and (tensors[0].device == torch.device(device)):
            row: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
            return row.view(torch.uint8)
        flat = torch.empty(sum(each.nbytes for each in tensors), dtype=torch.uint8, device=device)
        end = 0
        for dtype, run in groupby(tensors, key=lambda tensor: tensor.dtype):
            # torch cuts no empty tensors
            sources = [tensor for tensor in run if tensor.numel()]
            start, end = end, end + sum(tensor.nbytes for tensor in sources)
            if not sources:
                continue
            row = flat[start:end].view(dtype)
            torch._foreach_copy_(torch._C._nn.unflatten_dense_tensors(row, sources), sources)
        return flat
