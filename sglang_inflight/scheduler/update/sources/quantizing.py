"""Brings a trainer's floats into the form in which the served checkpoint stores its weights.

A quantized checkpoint stores a weight as two tensors: the values, one byte each, and the scales.
One scale belongs to a block of the weight, a row, or the whole. A value times its scale is the
weight. The model's loader takes these two tensors. It would cast a float to the dtype of the
values, and the scales of the weights before would stay. So a float tensor is quantized before the
loader sees it. Every rank quantizes the whole tensor, by operations that round in one way only, so
all ranks have the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from sglang_inflight.scheduler.update.checks.coverage import is_finite
from sglang_inflight.scheduler.update.checks.tensors import FLOATS, is_quantized
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.checkpoint_files import Stored
from sglang_inflight.vocabulary.errors import Refused, shorten

# The largest value of each dtype that is quantized into.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SCALES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu})
_POWERS_OF_TWO = "ue8m0"

# Elements quantized at a time. Their copies in float32 stay in a core's cache on a CPU. On a device
# they are enough for its kernels.
_ELEMENTS_ON_CPU = 1 << 18
_ELEMENTS_ON_DEVICE = 1 << 24


class Quantized(NamedTuple):
    """The form in which a checkpoint stores one weight."""

    # dtype and shape of the values: [..., out, in]
    dtype: torch.dtype
    shape: tuple[int, ...]
    # the tensor of the scales: [..., blocks of out, blocks of in], or the same without
    # dimensions of size 1
    scale: str
    scale_dtype: torch.dtype
    scale_shape: tuple[int, ...]
    # rows and columns with one scale
    block: tuple[int, int]
    powers_of_two: bool
    # says in a receipt how ``block`` was chosen
    layout: str

    def __str__(self) -> str:
        powers = ", powers of two" if self.powers_of_two else ""
        return f"{name_of(self.dtype)}, {self.layout}{powers}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_quantized(
    stored: Mapping[str, Stored], config: Mapping[str, Any]
) -> dict[str, Quantized | None]:
    """Return the forms of the quantized weights of a checkpoint, by name.

    ``config`` is the checkpoint's own quantization config; it may be empty. A weight has the form
    None if its scales are missing, or not understood.
    """
    scales = {scale for name in stored for scale in _names_of_scales(name)}
    return {
        name: _form_of(name, stored, config)
        for name, tensor in stored.items()
        if is_quantized(tensor.dtype) and name not in scales
    }


def _names_of_scales(name: str) -> Iterator[str]:
    """Yield the names that the scales of the weight ``name`` may have."""
    yield f"{name}_scale_inv"
    yield f"{name}_scale"
    if name.endswith(".weight"):
        yield name.removesuffix("weight") + "scale"


def _form_of(
    name: str, stored: Mapping[str, Stored], config: Mapping[str, Any]
) -> Quantized | None:
    dtype, shape = stored[name].dtype, stored[name].shape
    scale = next((one for one in _names_of_scales(name) if one in stored), None)
    if dtype not in _LARGEST or scale is None or f"{name}_zero_point" in stored or len(shape) < 2:
        return None
    has = stored[scale]
    if has.dtype not in _SCALES:
        return None
    for layout, block in _layouts(shape, config):
        blocks = _blocks(shape, block)
        if _squeezed(has.shape) == _squeezed(blocks) and 0 not in shape:
            powers = has.dtype is torch.float8_e8m0fnu or config.get("scale_fmt") == _POWERS_OF_TWO
            return Quantized(dtype, shape, scale, has.dtype, has.shape, block, powers, layout)
    return None


def _layouts(
    shape: tuple[int, ...], config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the blocks that a weight of ``shape`` may have, each with words for a receipt."""
    out, size = shape[-2:]
    for rows, columns in _configured_blocks(config):
        yield f"blocks of {rows} by {columns}", (rows, columns)
    yield "one scale a row", (1, size)
    yield "one scale a tensor", (out, size)


def _configured_blocks(config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    groups = config.get("config_groups") or {}
    said = [config.get("weight_block_size")]
    said += [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    for block in said:
        if block:
            rows, columns = block
            yield rows, columns


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *stack, out, size = shape
    return (*stack, -(-out // block[0]), -(-size // block[1]))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape`` without dimensions of size 1: scales are stored with or without them."""
    return tuple(size for size in shape if size != 1)


class Quantizer:
    """Quantizes the tensors of one model's updates, on the staging thread.

    A weight comes as floats, or as the values and the scales. Both at once could not be told apart
    from two versions, so they are refused. Values and scales belong together in one update, and
    may come in several of its calls.
    """

    def __init__(self, quantized: Mapping[str, Quantized | None]) -> None:
        self._quantized = quantized
        self._weights = {form.scale: name for name, form in quantized.items() if form is not None}
        # values and scales, which belong together
        values = {name for name, form in quantized.items() if form is not None}
        self._parts = frozenset(values | self._weights.keys())
        # this update's weights that came as floats, and the values and scales that came
        self._converted: set[str] = set()
        self._as_stored: set[str] = set()

    def begin(self) -> None:
        """Begin an update: forget the tensors of the last one."""
        self._converted.clear()
        self._as_stored.clear()

    def quantize(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        check_finite: bool,
        rate_limit: RateLimit,
        counts: Counter[str],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, with values and scales in place of the floats of quantized weights.

        Tensors of other names, and of a shape that is not the weight's, are yielded as they are.
        ``counts`` counts the quantized tensors, by what came and what it became. Raises ``Refused``
        with the tensor's name if it cannot be quantized.
        """
        for name, tensor in weights:
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                yield name, tensor
            elif name in self._quantized and tensor.dtype in FLOATS:
                form = self._form_for(name, tensor)
                if form.shape != tuple(tensor.shape):
                    yield name, tensor
                    continue
                values, scales = quantized(tensor, form, rate_limit)
                if check_finite and not is_finite(scales.float()):
                    raise Refused(f"tensor {shorten(name)!r} holds NaN or infinity")
                self._converted.add(name)
                counts[f"{name_of(tensor.dtype)} to {form}"] += 1
                yield name, values
                # memory is needed for one of them at a time
                del values, tensor
                yield form.scale, scales
            else:
                self._note(name, tensor)
                yield name, tensor

    @property
    def takes_bulk(self) -> bool:
        """Whether ``note_stored`` knows tensors well enough: none has come as floats so far."""
        return not self._converted

    def note_stored(self, names: frozenset[str]) -> None:
        """Note tensors that came as they are stored."""
        self._as_stored |= names & self._parts

    def note_patched(self, name: str) -> None:
        """Note some values of a tensor that is stored in a float dtype, as one of scales may be."""
        if (weight := self._weights.get(name)) is None:
            return
        if weight in self._converted:
            raise self._twice(weight)
        self._as_stored.add(name)

    def refuse_parts(self) -> None:
        """Raise ``Refused`` for values without their scales, and for scales without values."""
        for name in sorted(self._as_stored):
            other = self._partner_of(name)
            if other not in self._as_stored:
                raise Refused(
                    f"tensors {shorten(name)!r} and {shorten(other)!r} belong together, and the "
                    f"update lacks {shorten(other)!r}"
                )

    def _form_for(self, name: str, tensor: torch.Tensor) -> Quantized:
        form, came = self._quantized[name], name_of(tensor.dtype)
        if form is None:
            raise Refused(
                f"tensor {shorten(name)!r} is {came}, and cannot be brought into the form in which "
                "the served checkpoint stores it: send it in that form"
            )
        if form.scale in self._as_stored:
            raise self._twice(name)
        return form

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        form = self._quantized.get(name)
        if form is not None and tensor.dtype != form.dtype:
            raise Refused(
                f"tensor {shorten(name)!r} is {name_of(tensor.dtype)}; the served checkpoint "
                f"stores it as {name_of(form.dtype)}"
            )
        weight = self._weights.get(name)
        if weight in self._converted:
            raise self._twice(weight)
        if form is not None or weight is not None:
            self._as_stored.add(name)

    def _partner_of(self, name: str) -> str:
        form = self._quantized.get(name)
        return self._weights[name] if form is None else form.scale

    def _twice(self, name: str) -> Refused:
        form = self._quantized[name]
        assert form is not None
        return Refused(
            f"tensor {shorten(name)!r} came as floats, and its scales {shorten(form.scale)!r} came "
            f"too: send the floats alone, or {name_of(form.dtype)} with its scales"
        )


def quantized(
    tensor: torch.Tensor, form: Quantized, rate_limit: RateLimit
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales of a float ``tensor``, on its device.

    ``tensor`` has ``form.shape``. A scale is the largest magnitude in its block over the largest
    value of ``form.dtype``, or the next power of two. It is rounded to ``form.scale_dtype`` before
    the block is divided by it. A block of zeros has the scale 1. With NaN or infinity in a block
    its scale is one of them.
    """
    *stack, out, size = form.shape
    values = torch.empty(form.shape, dtype=form.dtype, device=tensor.device)
    blocks = _blocks(form.shape, form.block)
    scales = torch.empty(blocks, dtype=form.scale_dtype, device=tensor.device)
    count = math.prod(stack)
    for matrix, to, scale in zip(
        tensor.reshape(count, out, size),
        values.view(count, out, size),
        scales.view(count, *blocks[-2:]),
        strict=True,
    ):
        scale.copy_(_scales_of(matrix, form, rate_limit))
        _divide(matrix, scale, to, form, rate_limit)
    return values, scales.view(form.scale_shape)


def _scales_of(matrix: torch.Tensor, form: Quantized, rate_limit: RateLimit) -> torch.Tensor:
    """Return the scales [blocks of out, blocks of in], float32, of ``matrix`` [out, in]."""
    rows, columns = form.block
    found = []
    for piece in matrix.split(_rows_at_a_time(matrix)):
        found.append(_in_blocks(piece, columns).abs().amax(-1).float())
        rate_limit.spend(piece.nbytes)
    of_rows = torch.cat(found)
    padded = pad(of_rows, (0, 0, 0, -len(of_rows) % rows))
    largest = padded.view(-1, rows, padded.shape[1]).amax(1)
    scales = largest / _LARGEST[form.dtype]
    # a scale that is rounded to 0 would make its block infinite
    scales = scales.clamp_(min=torch.finfo(form.scale_dtype).tiny).where(largest != 0, 1.0)
    return _next_powers_of_two(scales) if form.powers_of_two else scales


def _divide(
    matrix: torch.Tensor,
    scales: torch.Tensor,
    to: torch.Tensor,
    form: Quantized,
    rate_limit: RateLimit,
) -> None:
    """Write ``matrix`` [out, in] over ``scales``, as stored, into ``to`` [out, in]."""
    rows, columns = form.block
    largest = _LARGEST[form.dtype]
    # one row of scales for each row of the matrix, a view if all rows share one
    of_rows = scales.float()
    of_rows = (
        of_rows.expand(len(matrix), -1)
        if len(of_rows) == 1
        else of_rows.repeat_interleave(rows, dim=0)[: len(matrix)]
    )
    at_a_time = _rows_at_a_time(matrix)
    for piece, target, by in zip(
        matrix.split(at_a_time), to.split(at_a_time), of_rows.split(at_a_time), strict=True
    ):
        wide = _in_blocks(piece.float(), columns) / by.unsqueeze(-1)
        wide.clamp_(-largest, largest)
        if not form.dtype.is_floating_point:
            wide.round_()
        target.copy_(wide.view(len(piece), -1)[:, : piece.shape[1]])
        rate_limit.spend(piece.nbytes + wide.nbytes + target.nbytes)


def _rows_at_a_time(matrix: torch.Tensor) -> int:
    most = _ELEMENTS_ON_CPU if matrix.device.type == "cpu" else _ELEMENTS_ON_DEVICE
    return max(1, most // matrix.shape[1])


def _in_blocks(piece: torch.Tensor, columns: int) -> torch.Tensor:
    """Return ``piece`` [rows, in] as [rows, blocks of in, columns], with zeros at the end."""
    short = -piece.shape[1] % columns
    padded = pad(piece, (0, short)) if short else piece
    return padded.reshape(len(piece), -1, columns)


def _next_powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Round positive float32 ``scales`` up to powers of two, exactly: add, and drop the mantissa.

    NaN and infinity become infinity.
    """
    bits = scales.view(torch.int32)
    up = ((bits + 0x7F_FFFF) & 0x7F80_0000).view(torch.float32)
    return up.where(scales.isfinite(), torch.inf)
