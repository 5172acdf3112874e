"""Checks on each tensor on its way into the shadow.

A head tied to the embeddings is compared with these embeddings.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from sglang_inflight.scheduler.update.checks.coverage import largest_magnitude
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, Write
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.storages import memory_key
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Refused, shorten

# A trainer's precision may differ from the server's: these dtypes convert into each other.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# every one of these dtypes holds a magnitude up to here
HELD_BY_ALL = torch.finfo(torch.float16).max
_HEADS = ("lm_head.weight",)
# names in this order: Llama and most others, GPT-2, Bloom and ChatGLM, Llama's own checkpoints
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)


def is_quantized(dtype: torch.dtype) -> bool:
    """Return whether tensors of ``dtype`` hold values that need scales."""
    return dtype.itemsize == 1 and dtype not in (torch.bool, torch.float8_e8m0fnu)


class TensorChecks:
    """Watches a loader take tensors one by one, and names the wrong tensor.

    A loader may skip an unknown name silently. So each tensor is followed to the weights
    (``dataflow.py``), and a tensor that reached none is refused. There are two exceptions. The
    loader may skip a tensor of the start's checkpoint for a reason of its own, such as another
    pipeline stage. And a model with tied embeddings skips the head. If the loader needs a tensor
    and has not used it, the loader holds it for a tensor missing in this call (``finish``).

    A loader may also cut or pad its input (on a CPU some do). So a tensor of the start's checkpoint
    must come in the same shape.

    One object serves one call, on the staging thread.
    """

    def __init__(
        self,
        *,
        checkpoint_shapes: Mapping[str, tuple[int, ...]],
        dataflow: Dataflow,
        takes_all: bool,
        takes_floats_only: bool,
        is_needed: Callable[[str], bool],
        tied: TiedHead | None,
        check_finite: bool,
        rate_limit: RateLimit,
    ) -> None:
        """``checkpoint_shapes``: of the tensors in the start's checkpoint.

        ``takes_all`` is false for a custom loader, which may skip any tensor, and for a second
        model fed with the same tensors. ``takes_floats_only``: the weights are not quantized.
        ``is_needed`` says of a name in ``checkpoint_shapes`` whether the loader uses it. ``tied``
        is None if the model does not tie its head.
        """
        self._checkpoint_shapes = checkpoint_shapes
        self._dataflow = dataflow
        self._takes_all = takes_all
        self._takes_floats_only = takes_floats_only
        self._is_needed = is_needed
        self._tied = tied
        self._check_finite = check_finite
        self._rate_limit = rate_limit
        self._current: tuple[str, torch.Tensor] | None = None
        self._was_taken_whole = False
        # received, and not in a weight yet: tensors needed by the loader, and unknown tensors
        self._waiting: dict[str, torch.Tensor] = {}
        self._unknown: dict[str, weakref.ref[torch.Tensor]] = {}
        # the tensor received last in each storage, by ``memory_key``
        self._last_in: dict[int, weakref.ref[torch.Tensor]] = {}
        # the largest magnitude in each tensor that not every dtype can hold
        self._large: dict[str, float] = {}
        self.tensors = 0
        self.bytes = 0
        # how many tensors were quantized, by what came and what it became
        self.quantized: Counter[str] = Counter()
        self.names: set[str] = set()
        # names of tensors that have to come whole, because parts of some were not taken
        self.unpatched: set[str] = set()

    def refuse_wrong_dtype(self, write: Write) -> None:
        """Raise ``Refused`` if a tensor's dtype cannot fill the weight that ``write`` is about.

        A loader's copy would cast floats to a quantized weight's dtype, past its scales.
        """
        if write.copied in FLOATS and is_quantized(write.dtype):
            name = f" {shorten(self._current[0])!r}" if self._current is not None else ""
            raise Refused(
                f"tensor{name} is {write.copied}, and the model's loader would cast it to "
                f"parameter {write.target.name!r}, which is {write.dtype} and has scales: send it "
                "by its name in the served checkpoint, or in that dtype with its scales"
            )
        if self._current is None or not self._takes_floats_only or write.dtype not in FLOATS:
            return
        name, tensor = self._current
        if tensor.dtype not in FLOATS:
            raise Refused(
                f"tensor {shorten(name)!r} is {tensor.dtype}; parameter {write.target.name!r} "
                "takes float16, bfloat16, float32 or float64"
            )

    def note_magnitude(self, name: str, largest: float) -> None:
        """Remember the largest magnitude of a tensor for ``refuse_too_large``."""
        if largest > HELD_BY_ALL:
            self._large[name] = largest

    def refuse_too_large(self, write: Write) -> None:
        """Raise ``Refused`` if a tensor's value would be infinite in the weight that it reaches."""
        if write.dtype not in FLOATS:
            return
        for name in sorted(write.names & self._large.keys()):
            largest = torch.tensor(self._large[name], dtype=torch.float64)
            if largest.to(write.dtype).isinf():
                raise infinite_refusal(name, self._large[name], write.target.name, write.dtype)

    def count(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, and count them as the sender's."""
        for name, tensor in weights:
            self.tensors += 1
            if isinstance(tensor, torch.Tensor):
                self.bytes += tensor.nbytes
            yield name, tensor

    def watch(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        again: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``again``, held by the loader in earlier calls, and then ``weights``."""
        for name, tensor in again.items():
            with self._dataflow.untraced():
                self._check_values(name, tensor)
            yield from self._pass_to_loader(name, tensor)
        pairs = iter(weights)
        while True:
            with self._dataflow.untraced():
                if (pair := next(pairs, None)) is None:
                    break
                name, tensor = pair
                self._check(name, tensor)
                if self._tied is not None:
                    self._tied.receive(name, tensor)
            self.names.add(name)
            yield from self._pass_to_loader(name, tensor)
        self._current = None
        self._was_taken_whole = True
        self._dataflow.receive_no_more()

    def note_moved(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that goes past the model's loader, to where its plan says."""
        self.names.add(name)
        if self._tied is not None:
            self._tied.receive(name, tensor)

    def note_bulk(self, names: frozenset[str], nbytes: int) -> None:
        """Note tensors of ``nbytes`` together that a load plan takes, and none may be tied."""
        self.tensors += len(names)
        self.bytes += nbytes
        self.names |= names

    def note_patched(self, name: str, nbytes: int) -> None:
        """Note a sparse tensor of ``nbytes`` that goes past the model's loader."""
        self.tensors += 1
        self.bytes += nbytes
        self.names.add(name)

    def finish(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors needed and not yet used by the loader, after its return.

        Raise ``Refused`` if the model has no use for a received tensor.
        """
        for name in self._unknown:
            self._refuse_unless_reached(name)
        reached = self._dataflow.reached
        return {name: t.clone() for name, t in self._waiting.items() if name not in reached}

    def _pass_to_loader(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._current = name, tensor
        key = memory_key(tensor)
        last = self._last_in.get(key)
        # after the last tensor in a memory is gone, others may get that memory
        self._dataflow.receive(name, tensor, is_alone=last is None or last() is None)
        self._last_in[key] = weakref.ref(tensor)
        yield name, tensor
        self._current = None
        self._look_back(name, tensor)
        self._current = name, tensor

    def _look_back(self, name: str, tensor: torch.Tensor) -> None:
        """Note an unused tensor, after the loader has asked for the next one or returned."""
        if name in self._dataflow.reached:
            return
        if name in self._checkpoint_shapes:
            if self._is_needed(name):
                self._waiting[name] = tensor
        elif self._takes_all and not self._is_tied_head(name):
            for other, held in self._unknown.items():
                if held() is None:
                    self._refuse_unless_reached(other)
            self._unknown[name] = weakref.ref(tensor)

    def _refuse_unless_reached(self, name: str) -> None:
        if name not in self._dataflow.reached:
            raise Refused(f"the model has no weight named {shorten(name)!r}")

    def _is_tied_head(self, name: str) -> bool:
        return self._tied is not None and is_head(name)

    @property
    def is_the_loaders_turn(self) -> bool:
        """True while the loader holds a tensor, and after the loader took the last one."""
        return self._current is not None or self._was_taken_whole

    def explain(self, error: Exception) -> Refused:
        """Return a loader's ``error`` as a ``Refused`` naming the current tensor."""
        reason = shorten(str(error))
        if self._current is None:
            if isinstance(error, KeyError):
                return Refused(f"the model has no weight named {reason}")
            return Refused(f"the model's loader fails: {reason or type(error).__name__}")
        name, tensor = self._current
        named, shape = shorten(name), list(tensor.shape)
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
        expected = self._checkpoint_shapes.get(name)
        if expected is not None and expected != tuple(tensor.shape):
            raise Refused(
                f"tensor {shorten(name)!r} has shape {list(tensor.shape)}; the model's has "
                f"{list(expected)}"
            )
        self._check_values(name, tensor)

    def _check_values(self, name: str, tensor: torch.Tensor) -> None:
        if not self._check_finite or tensor.dtype not in FLOATS:
            return
        largest = 0.0
        for (piece,) in self._rate_limit.cut(tensor):
            # the first argument is returned if neither is larger: a piece's NaN must win
            largest = max(largest_magnitude(piece), largest)
            if not math.isfinite(largest):
                raise Refused(f"tensor {shorten(name)!r} holds NaN or infinity")
        self.note_magnitude(name, largest)


def infinite_refusal(name: str, largest: float, weight: str, dtype: torch.dtype) -> Refused:
    return Refused(
        f"tensor {shorten(name)!r} holds a value of magnitude {largest:.6g}, and parameter "
        f"{weight!r} is {dtype}, where it would be infinite: {torch.finfo(dtype).max:.6g} is the "
        "largest"
    )


class TiedHead:
    """Compares an update's head with the same update's embeddings.

    A checkpoint of such a model has the embeddings alone, but a trainer's ``state_dict()`` has
    both names. The model's loader skips the head. In a pipeline the last stage loads the head, and
    the first stage the embeddings. So both must be equal. One object serves one update of one
    model, on the staging thread.
    """

    def __init__(self) -> None:
        self._head: tuple[str, str] | None = None
        self._embeddings: str | None = None

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith(_HEADS):
            self._head = name, _digest_of(tensor)
        elif name.endswith(_EMBEDDINGS):
            self._embeddings = _digest_of(tensor)

    def refuse_if_not_the_embeddings(self) -> None:
        """Raise ``Refused`` if the update's head differs from its embeddings."""
        if self._head is None:
            return
        name, digest = self._head
        if self._embeddings is None:
            raise Refused(
                f"the model ties {name!r} to its embeddings, which were not sent: send the "
                "embeddings in the same update"
            )
        if digest != self._embeddings:
            raise Refused(
                f"the model ties {name!r} to its embeddings, and the update brings a head that "
                "differs from the embeddings of the update: send equal tensors, or no head"
            )


def is_head(name: str) -> bool:
    return name.endswith(_HEADS)


def may_be_tied(name: str) -> bool:
    """Return whether ``TiedHead`` compares the tensor ``name`` with another one."""
    return name.endswith(_HEADS + _EMBEDDINGS)


def _digest_of(tensor: torch.Tensor) -> str:
    digest = Digest()
    for _ in digest.read("", tensor):
        pass
    return digest.hexdigest()
