"""Checks on each tensor on its way into the shadow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.update.checks.coverage import is_finite
from sglang_inflight.scheduler.update.shorten import shorten
from sglang_inflight.scheduler.update.throttle.rate import RateLimit

# A trainer may keep more or less precision than the server: these convert into each other.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_HEAD = "lm_head.weight"


class TensorChecks:
    """Watches a loader take tensors one by one, and names the tensor that is wrong.

    A loader skips a name that it does not know, some without a word. So the writes are
    counted between one tensor and the next: a tensor that wrote nothing is refused,
    unless the checkpoint that is being served holds a tensor of that name too, which the
    loader then skips for a reason of its own (another pipeline stage), or it is the head
    of a model that ties it to the embeddings: a checkpoint has those alone, but a
    trainer's ``state_dict()`` has both names.

    A loader may also cut or pad what it is given (on a CPU some do), so a tensor that the
    served checkpoint holds must come in the same shape.

    One object serves one call, on the staging thread.
    """

    def __init__(
        self,
        *,
        served: Mapping[str, tuple[int, ...]],
        expects_writes: bool,
        ties_head: bool,
        check_finite: bool,
        rate_limit: RateLimit,
    ) -> None:
        """``served`` has the shapes of the tensors in the checkpoint that is served.

        ``expects_writes`` is false for a loader of the user's, which may write as it likes.
        """
        self._served = served
        self._expects_writes = expects_writes
        self._ties_head = ties_head
        self._check_finite = check_finite
        self._rate_limit = rate_limit
        self._current: tuple[str, torch.Tensor] | None = None
        self._writes = 0
        self.tensors = 0
        self.bytes = 0
        self.names: set[str] = set()

    def count_write(self, parameter: str) -> None:
        self._writes += 1
        if self._current is None:
            return
        name, tensor = self._current
        if tensor.dtype not in _FLOATS:
            raise Refused(
                f"tensor {shorten(name)!r} is {tensor.dtype}; parameter {parameter!r} takes "
                "float16, bfloat16, float32 or float64"
            )

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._check(name, tensor)
            self._current, before = (name, tensor), self._writes
            self.tensors += 1
            self.bytes += tensor.nbytes
            self.names.add(name)
            yield name, tensor
            if self._expects_writes and self._writes == before and not self._may_skip(name):
                raise Refused(f"the model has no weight named {shorten(name)!r}")
        self._current = None

    def _may_skip(self, name: str) -> bool:
        return name in self._served or (self._ties_head and name.endswith(_HEAD))

    @property
    def holds_a_tensor(self) -> bool:
        """Whether the loader was given one and did not ask for the next."""
        return self._current is not None

    def explain(self, error: Exception) -> Refused:
        """``error``, which a loader raised, as an answer that names the tensor it holds."""
        assert self._current is not None
        name, tensor = self._current
        named, shape, reason = shorten(name), list(tensor.shape), shorten(str(error))
        if isinstance(error, KeyError):
            return Refused(f"the model has no weight named {named!r} (looked for {reason})")
        return Refused(
            f"tensor {named!r} of shape {shape} and {tensor.dtype} does not fit the model: "
            f"{reason or type(error).__name__}"
        )

    def _check(self, name: str, tensor: object) -> None:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Refused(
                "expected pairs of a name and a tensor, got "
                f"{type(name).__name__} and {type(tensor).__name__}"
            )
        expected = self._served.get(name)
        if expected is not None and expected != tuple(tensor.shape):
            raise Refused(
                f"tensor {shorten(name)!r} has shape {list(tensor.shape)}; the model's has "
                f"{list(expected)}"
            )
        if self._check_finite and tensor.dtype in _FLOATS and not self._is_finite(tensor):
            raise Refused(f"tensor {shorten(name)!r} holds NaN or infinity")

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        return all(is_finite(piece) for (piece,) in self._rate_limit.cut(tensor))
