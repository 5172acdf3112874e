"""Many tensors in one: a broadcast has a cost of its own, whatever it carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """``flat`` holds the bytes of the tensors that are named, one after the other."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor

    def describe(self) -> dict[str, object]:
        """Its fields in the body of an update."""
        return {
            "names": self.names,
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "load_format": "flattened_bucket",
        }


def fill_buckets(
    tensors: Iterable[NamedTensor], most_bytes: int, device: torch.device | str
) -> Iterator[Bucket]:
    """Buckets on ``device``, of ``most_bytes`` at most, or of one tensor that is larger.

    ``tensors`` may be a generator: none is held any longer than until its bucket is filled.
    Raises ``TypeError`` for what is no whole tensor.
    """
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        _require_whole(name, tensor)
        # the receiver has no place for one that begins within an element
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
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, and no tensor")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{name!r} is a part of a tensor: send what its full_tensor() returns")


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
