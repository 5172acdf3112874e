"""Find what a version changes: the elements whose bits differ from the version before.

A changed tensor NAME is sent as two. ``NAME.indices`` has flat positions in NAME, ascending.
``NAME.values`` has the new elements there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.vocabulary.sparse import INDICES, VALUES, index_dtype

if TYPE_CHECKING:
    import torch

    NamedTensor = tuple[str, torch.Tensor]
    NamedTensors = Mapping[str, torch.Tensor] | Iterable[NamedTensor]

# elements compared at a time
_PIECE = 16 << 20


class Change(NamedTuple):
    """The changed elements of one tensor, on the device of its new version.

    ``indices``: flat positions, ascending; int32 if every position of the tensor fits, else int64.
    ``values``: the new elements there, in the tensor's dtype. Both are of shape ``(changed,)``.
    """

    indices: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes

    def named(self, name: str) -> list[NamedTensor]:
        """Return both halves with the names that stand for the tensor ``name``."""
        return [(name + INDICES, self.indices), (name + VALUES, self.values)]

    def write_to(self, tensor: torch.Tensor) -> None:
        """Make the change in ``tensor``, which is contiguous."""
        import torch

        at = self.indices.to(tensor.device, torch.int64)
        _bits_of(tensor.view(-1))[at] = _bits_of(self.values).to(tensor.device)


def changes_since(previous: NamedTensors, state_dict: NamedTensors) -> Iterator[NamedTensor]:
    """Yield ``NAME.indices`` and ``NAME.values`` of each tensor that differs from ``previous``.

    The two follow each other (see ``Change``), in the order of ``state_dict``, which is read once.
    An unchanged tensor yields nothing. Elements are compared bit by bit: another payload of NaN is
    a change, and so is another sign of zero. Tensors may be of any dtype of up to 8 bytes, on any
    device and in any layout of memory. Comparing takes memory for 16 Mi elements at a time,
    beside the changes of one tensor.

    Raises ``ValueError`` with the tensor's name if its shape or its dtype has changed, or if only
    one of the two has it, and ``TypeError`` for a non-tensor or a shard of a tensor.
    """
    for name, change in _find_changes(previous, state_dict):
        yield from change.named(name)


def _find_changes(previous: NamedTensors, state_dict: NamedTensors) -> Iterator[tuple[str, Change]]:
    before = dict(previous)
    seen: set[str] = set()
    for name, tensor in _pairs(state_dict):
        if name in seen:
            raise ValueError(f"{name!r} comes twice")
        if name not in before:
            raise ValueError(f"{name!r} was not there before")
        seen.add(name)
        change = find_change(name, before[name], tensor)
        if change is not None and len(change.indices):
            yield name, change
    if missing := before.keys() - seen:
        raise ValueError(f"{min(missing)!r} was there before, and is missing")


def find_change(
    name: str, old: torch.Tensor, new: torch.Tensor, *, most_bytes: int | None = None
) -> Change | None:
    """Return the elements of ``new`` that differ from ``old``, maybe none.

    Returns None as soon as they take more than ``most_bytes``. Raises as ``changes_since`` does.
    """
    import torch

    require_whole(name, old)
    require_whole(name, new)
    if (was := _form_of(old)) != (now := _form_of(new)):
        raise ValueError(f"{name!r} is {now}, and was {was} before")
    if new.itemsize > 8:
        raise ValueError(f"{name!r} is of {new.dtype}: an element takes more than 8 bytes")
    old, new = old.detach(), new.detach()
    kind = index_dtype(new.numel())
    indices = [torch.empty(0, dtype=kind, device=new.device)]
    values = [torch.empty(0, dtype=new.dtype, device=new.device)]
    start = nbytes = 0
    for before, after in zip(_pieces(old), _pieces(new), strict=True):
        at = (_bits_of(before).to(after.device) != _bits_of(after)).nonzero().view(-1)
        nbytes += len(at) * (kind.itemsize + new.itemsize)
        if most_bytes is not None and nbytes > most_bytes:
            return None
        if len(at):
            values.append(_bits_of(after)[at].view(new.dtype))
            indices.append((at + start).to(kind))
        start += len(after)
    return Change(torch.cat(indices), _cat(values))


class Snapshot(Mapping[str, "torch.Tensor"]):
    """A copy of a version in the memory of the CPU, to find what the next one changes.

        snapshot = Snapshot(model.state_dict())
        for step in …:
            train(model)
            write_changes(folder, snapshot.advance(model.state_dict()), base_version=…)

    The copy belongs to the snapshot: a trainer may change its own tensors at any time.
    """

    def __init__(self, named_tensors: NamedTensors = ()) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _pairs(named_tensors):
            self.hold(name, tensor)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, in place of the one of this name."""
        import torch

        require_whole(name, tensor)
        held = self._tensors.get(name)
        if held is None or _form_of(held) != _form_of(tensor):
            held = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._tensors[name] = held.copy_(tensor.detach())

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            del self._tensors[name]

    def advance(self, state_dict: NamedTensors) -> Iterator[NamedTensor]:
        """Yield ``changes_since(self, state_dict)``, and take over each change on the way.

        If reading ends early, or the changes do not reach the server, the snapshot is of no use:
        make a new one of a version that is known to be served.
        """
        for name, change in _find_changes(self, state_dict):
            change.write_to(self._tensors[name])
            yield from change.named(name)

    def follow(self, name: str, tensor: torch.Tensor) -> Change | None:
        """Take over ``tensor``, and return what has changed, or None if the tensor is no larger.

        The return is also None if the tensor was not held, or had another shape or dtype.
        """
        require_whole(name, tensor)
        held = self._tensors.get(name)
        if held is not None and _form_of(held) == _form_of(tensor):
            change = find_change(name, held, tensor, most_bytes=tensor.nbytes - 1)
            if change is not None:
                change.write_to(held)
                return change
        self.hold(name, tensor)
        return None


def in_halves(changes: Iterable[NamedTensor]) -> Iterator[tuple[NamedTensor, NamedTensor]]:
    """Yield ``NAME.indices`` and ``NAME.values`` together.

    Raises ``ValueError`` with the name that does not follow, or is not followed by, its other half.
    """
    first: NamedTensor | None = None
    for pair in changes:
        if first is None:
            first = pair
            continue
        name = first[0].removesuffix(INDICES)
        if first[0] != name + INDICES or pair[0] != name + VALUES:
            raise ValueError(f"{first[0]!r} and {pair[0]!r} are not the halves of one change")
        yield first, pair
        first = None
    if first is not None:
        raise ValueError(f"{first[0]!r} comes without its other half")


def require_whole(name: str, tensor: object) -> None:
    """Raise ``TypeError`` if ``tensor`` is no tensor, or a shard of one."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{name!r} is a shard of a tensor: send its full_tensor()")


def _pairs(named_tensors: NamedTensors) -> Iterable[NamedTensor]:
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def _form_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all elements in their order, flat, at most ``_PIECE`` at a time.

    The cuts depend on the shape alone, so two tensors of one shape are cut alike.
    """
    if tensor.numel() <= _PIECE:
        yield tensor.reshape(-1)
        return
    row = tensor.numel() // len(tensor)
    if row > _PIECE:
        for part in tensor:
            yield from _pieces(part)
        return
    for rows in tensor.split(_PIECE // row):
        yield rows.reshape(-1)


def _bits_of(flat: torch.Tensor) -> torch.Tensor:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.itemsize])


def _cat(values: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate, also values of dtypes for which torch cannot."""
    import torch

    return torch.cat([_bits_of(value) for value in values]).view(values[0].dtype)
