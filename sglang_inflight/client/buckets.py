"""Flatten many tensors into one, to save the fixed cost of a broadcast for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """Named tensors, concatenated as bytes in ``flat``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor

    def describe(self) -> dict[str, object]:
        """Return the bucket's fields of an update's body."""
        return {
            "names": self.names,
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "load_format": "flattened_bucket",
        }


def fill_buckets(
    tensors: Iterable[NamedTensor], most_bytes: int, device: torch.device | str
) -> Iterator[Bucket]:
    """Yield buckets on ``device`` of at most ``most_bytes``, or of one larger tensor.

    ``tensors`` may be a generator: a tensor is held only until its bucket is filled. Raises
    ``TypeError`` for a non-tensor, and for a shard of a tensor.
    """
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        _require_whole(name, tensor)
        # the receiver cannot view a tensor at an offset within an element
        if bucket and (size + tensor.nbytes > most_bytes or size % tensor.itemsize):
            yield _flatten(bucket, device)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield _flatten(bucket, device)


def _require_whole(name: str, tensor: object) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{name!r} is a shard of a tensor: send its full_tensor()")


def _flatten(bucket: list[NamedTensor], device: torch.device | str) -> Bucket:
    import torch

    parts = [
        tensor.detach().contiguous().flatten().view(torch.uint8).to(device) for _, tensor in bucket
    ]
    return Bucket(
        [name for name, _ in bucket],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        [list(tensor.shape) for _, tensor in bucket],
        parts[0] if len(parts) == 1 else torch.cat(parts),
    )
