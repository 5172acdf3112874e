"""Digests of the tensors that come, and their comparison with the sender's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import torch

from sglang_inflight.messages import AskedDigests
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.tensor_digest import HostReader, TensorDigest
from sglang_inflight.vocabulary.errors import Altered, describe, list_names, shorten


class Arrivals:
    """The digests of one call's tensors, as they come from their source.

    A tensor is read before anything else looks at it: before it is quantized, filled in from sparse
    parts, copied, or loaded. So its digest is the one that its sender has computed.

    The staging thread reads it. A tensor on a device is copied to the host in pieces, on the
    staging thread's stream. The thread waits for that stream alone, so no forward waits. Pieces
    count for the rate limit, as all that staging touches.
    """

    def __init__(
        self,
        asked: AskedDigests | None,
        reader: HostReader,
        check: Callable[[], None],
        rate_limit: RateLimit,
    ) -> None:
        """``asked`` is None if no digest is wanted. ``check`` raises when it is time to give up."""
        self.is_asked = asked is not None
        self._expected: dict[str, str] | None = None
        if asked is not None and asked.expected is not None:
            self._expected = msgspec.json.decode(asked.expected, type=dict[str, str])
        self._reader = reader
        self._check = check
        self._rate_limit = rate_limit
        # digests of the first reading; None if no digest is wanted
        self.digests: list[str] | None = None
        # this reading's digests, the names that came, and what is wrong with some of them
        self._came: list[str] = []
        self._names: set[str] = set()
        self._altered: list[str] = []
        self._surplus: list[str] = []

    def watch(self, weights: Weights) -> Weights:
        """Yield ``weights``, each after its digest was computed."""
        with closing(weights):
            for name, tensor in weights:
                # others are refused by the loader's checks
                if self.is_asked and isinstance(name, str) and isinstance(tensor, torch.Tensor):
                    self._receive(name, tensor)
                yield name, tensor

    def end_reading(self) -> None:
        """End a reading of the source. A target and its draft both read a checkpoint.

        Raise ``Altered`` unless all expected tensors came, with their digests, and no others.
        """
        missing = sorted((self._expected or {}).keys() - self._names)
        wrong = [
            (self._altered, "came with another digest than expected"),
            (self._surplus, "came without an expected digest"),
            (missing, "did not come"),
        ]
        if said := [f"{_list(names)} {what}" for names, what in wrong if names]:
            raise Altered(f"expected_digests: {'; '.join(said)}")
        if self.is_asked and self.digests is None:
            self.digests = self._came
        self._came = []
        self._names.clear()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Name the altered tensors if the block fails: a wrong value fails in many ways."""
        try:
            yield
        except Altered:
            raise
        except Exception as error:
            if not self._altered:
                raise
            raise Altered(
                f"expected_digests: {_list(self._altered)} came with another digest than expected; "
                f"then {describe(error)}"
            ) from error

    def _receive(self, name: str, tensor: torch.Tensor) -> None:
        one = TensorDigest(name, tensor)
        for piece in one.read(self._reader):
            self._check()
            self._rate_limit.spend(piece.nbytes)
        digest = one.hexdigest()
        self._came.append(digest)
        self._names.add(name)
        if self._expected is None:
            return
        if name not in self._expected:
            self._surplus.append(name)
        elif self._expected[name] != digest:
            self._altered.append(name)


def _list(names: list[str]) -> str:
    return list_names([repr(shorten(name)) for name in names])
