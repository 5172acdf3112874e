"""One rank's weights as another server serves them: what their loader asks, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from sglang_inflight.messages import SavedVersion
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.tensor_digest import HostReader, TensorDigest
from sglang_inflight.vocabulary.errors import Refused, list_names, shorten

# a tensor's dtype, as torch writes it, and its shape
Form = tuple[str, tuple[int, ...]]


class ServedTensor(NamedTuple):
    """A tensor on the host, and its line in the digest of its rank."""

    name: str
    tensor: torch.Tensor
    line: str


class ServedPart(Protocol):
    """One rank's part of another server's version. Belongs to the staging thread."""

    @property
    def version(self) -> SavedVersion: ...

    @property
    def digest(self) -> str:
        """The rank's digest, once all tensors were read."""

    @property
    def numbers(self) -> Mapping[str, str]:
        """Numbers that SGLang's finishing makes, written as Python writes them."""

    def require(self, layout: Mapping[str, str], wanted: Mapping[str, torch.Tensor]) -> None:
        """Raise ``Refused`` unless it is of this layout, and has the tensors ``wanted``."""

    def read(self, rate_limit: RateLimit, check: Callable[[], None]) -> Iterator[ServedTensor]:
        """Yield each tensor. Raise ``Refused`` with the name of one that was altered.

        Each call reads all tensors, and the second one yields the same as the first.
        """


def require_layout(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise ``Refused`` with the first fact that differs."""
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            raise Refused(
                f"it was saved by a server of another layout: {shorten(name)} is "
                f"{shorten(str(there))!r} there, and {here!r} here"
            )


def require_tensors(theirs: Mapping[str, Form], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise ``Refused`` unless there are the tensors ``wanted``, in shape and dtype."""
    if missing := sorted(wanted.keys() - theirs.keys()):
        raise Refused(f"{list_names([*map(repr, missing)])} is missing")
    if surplus := sorted(theirs.keys() - wanted.keys()):
        names = [repr(shorten(name)) for name in surplus]
        raise Refused(f"{list_names(names)} is no weight of this server")
    for name, tensor in wanted.items():
        dtype, shape = theirs[name]
        if (dtype, shape) != (str(tensor.dtype), tuple(tensor.shape)):
            raise Refused(
                f"{name!r} is {shorten(dtype)} of shape {list(shape[:8])} there, and "
                f"{tensor.dtype} of shape {list(tensor.shape)} here"
            )


def checked(
    name: str, tensor: torch.Tensor, digest: str, reader: HostReader, check: Callable[[], None]
) -> ServedTensor:
    """Return ``tensor`` with its line. Raise ``Refused`` unless it has ``digest``."""
    one = TensorDigest(name, tensor)
    for _ in one.read(reader):
        check()
    if one.hexdigest() != digest:
        raise Refused(f"{name!r} has the digest {one.hexdigest()}, and was saved with {digest}")
    return ServedTensor(name, tensor, one.line)
