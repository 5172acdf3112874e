"""Floats for a quantized checkpoint: values, scales, and refusals.

``straightforward`` quantizes in float64, block by block, in Python.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.messages import Staged, TensorSource
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.sources import quantizing
from sglang_inflight.scheduler.update.sources.batches import one_batch
from sglang_inflight.scheduler.update.sources.checkpoint_files import (
    Stored,
    read_quantization_config,
    read_stored,
)
from sglang_inflight.scheduler.update.sources.quantizing import (
    Quantized,
    find_quantized,
    quantized,
)
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import shadows_of
from tests.unit.fakes import uncounted

pytestmark = pytest.mark.usefixtures("either_way")

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
BLOCKS: dict[str, Any] = {"weight_block_size": [4, 8]}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator)
    # blocks of very different magnitudes
    return (weight * torch.logspace(-4, 2, shape[-1])).to(dtype)


def form_of(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    *,
    dtype: torch.dtype = FP8,
    scale_dtype: torch.dtype = torch.float32,
    scale: str = "x.weight_scale_inv",
    **config: Any,
) -> Quantized | None:
    stored = {"x.weight": Stored(shape, dtype), scale: Stored(scale_shape, scale_dtype)}
    return find_quantized(stored, config)["x.weight"]


def known(form: Quantized | None) -> Quantized:
    assert form is not None
    return form


def straightforward(weight: torch.Tensor, form: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of ``weight`` [out, in], as float64."""
    rows, columns = form.block
    out, size = weight.shape
    values = torch.empty(out, size, dtype=torch.float64)
    scales = torch.empty(-(-out // rows), -(-size // columns), dtype=torch.float64)
    for i, j in torch.cartesian_prod(torch.arange(len(scales)), torch.arange(scales.shape[1])):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        largest = weight[at].double().abs().max()
        scale = (largest.float() / LARGEST[form.dtype]).double() if largest else torch.tensor(1.0)
        if form.powers_of_two:
            scale = 2.0 ** torch.ceil(torch.log2(scale.double()))
        scales[i, j] = scale.to(form.scale_dtype).double()
        over = (weight[at].float() / scales[i, j].float()).double()
        limit = LARGEST[form.dtype]
        values[at] = over.clamp(-limit, limit)
    if form.dtype is torch.int8:
        return values.round(), scales
    return values.float().to(FP8).double(), scales


FORMS = {
    "blocks": form_of((12, 24), (3, 3), **BLOCKS),
    "blocks that end outside": form_of((10, 19), (3, 3), **BLOCKS),
    "one block": form_of((3, 5), (1, 1), **BLOCKS),
    "powers of two": form_of((10, 19), (3, 3), scale_fmt="ue8m0", **BLOCKS),
    "powers of two in one byte": form_of(
        (10, 19), (3, 3), scale_dtype=torch.float8_e8m0fnu, scale="x.scale", **BLOCKS
    ),
    "rows": form_of((12, 24), (12, 1), scale="x.weight_scale"),
    "rows without the last dimension": form_of((12, 24), (12,), scale="x.weight_scale"),
    "rows in bfloat16": form_of(
        (12, 24), (12, 1), scale_dtype=torch.bfloat16, scale="x.weight_scale"
    ),
    "whole": form_of((12, 24), (), scale="x.weight_scale"),
    "int8": form_of((12, 24), (12, 1), dtype=torch.int8, scale="x.weight_scale"),
    "blocks of compressed-tensors": form_of(
        (12, 24),
        (3, 3),
        scale="x.weight_scale",
        config_groups={"group_0": {"weights": {"strategy": "block", "block_structure": [4, 8]}}},
    ),
}


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMS)
def test_quantization_follows_the_formula(name: str, came: torch.dtype) -> None:
    form = known(FORMS[name])
    weight = random(*form.shape, dtype=came)
    values, scales = quantized(weight, form, UNPACED)
    assert (values.dtype, values.shape) == (form.dtype, form.shape)
    assert (scales.dtype, scales.shape) == (form.scale_dtype, form.scale_shape)
    expected_values, expected_scales = straightforward(weight, form)
    assert torch.equal(scales.double().view(expected_scales.shape), expected_scales)
    assert torch.equal(values.double(), expected_values)


@pytest.mark.parametrize("name", FORMS)
def test_dequantized_weight_is_one_rounding_away(name: str) -> None:
    form = known(FORMS[name])
    weight = random(*form.shape)
    values, scales = quantized(weight, form, UNPACED)
    rows, columns = form.block
    scale = scales.double().view(-(-form.shape[0] // rows), -1)
    scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    scale = scale[: form.shape[0], : form.shape[1]]
    off = (values.double() * scale - weight.double()).abs()
    if form.dtype is torch.int8:
        bound = scale / 2
    else:
        # three bits of mantissa, and steps of 2**-9 below the smallest normal number
        bound = weight.double().abs() / 16 + scale * 2**-10
    if form.scale_dtype is torch.bfloat16:
        # the largest value is cut if its scale was rounded down
        bound = bound + weight.double().abs() * 2**-8
    assert bool((off <= bound * (1 + 1e-6)).all())


def test_pieces_do_not_change_the_quantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces end inside of blocks."""
    form = known(FORMS["blocks that end outside"])
    weight = random(*form.shape)
    at_once = quantized(weight, form, UNPACED)
    monkeypatch.setattr(quantizing, "_ELEMENTS_ON_CPU", 3 * form.shape[1])
    in_pieces = quantized(weight, form, UNPACED)
    for one, other in zip(at_once, in_pieces, strict=True):
        assert torch.equal(one.float(), other.float())


def test_stacked_experts_are_quantized_like_each_alone() -> None:
    """The rows of an expert are no multiple of a block's."""
    stacked = random(3, 10, 19)
    forms = {
        (3, 3, 3): (form_of((3, 10, 19), (3, 3, 3), **BLOCKS), FORMS["blocks that end outside"]),
        (3, 10, 1): (form_of((3, 10, 19), (3, 10, 1)), form_of((10, 19), (10, 1))),
        (3, 10): (form_of((3, 10, 19), (3, 10)), form_of((10, 19), (10,))),
        (3,): (form_of((3, 10, 19), (3,)), form_of((10, 19), ())),
    }
    for shape, (of_all, of_one) in forms.items():
        values, scales = quantized(stacked, known(of_all), UNPACED)
        assert scales.shape == shape
        for at, expert in enumerate(stacked):
            alone = quantized(expert, known(of_one), UNPACED)
            assert torch.equal(values[at].float(), alone[0].float())
            assert torch.equal(scales[at], alone[1])


def test_strides_do_not_change_the_quantized_weight() -> None:
    form = known(FORMS["blocks"])
    weight = random(*form.shape)
    as_view = weight.t().contiguous().t()
    for one, other in zip(
        quantized(weight, form, UNPACED), quantized(as_view, form, UNPACED), strict=True
    ):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("name", FORMS)
def test_zeros_and_tiny_values_stay_finite(name: str) -> None:
    form = known(FORMS[name])
    for value in (0.0, 1e-40):
        weight = torch.full(form.shape, value, dtype=torch.float32)
        values, scales = quantized(weight, form, UNPACED)
        assert not values.float().isnan().any()
        assert bool((scales.float() > 0).all())
        assert bool(scales.float().isfinite().all())


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (form_of((12, 24), (3, 3)), "blocks of unknown size"),
        (form_of((12, 24), (4, 3), **BLOCKS), "scales of another shape"),
        (form_of((12, 24), (3, 3), scale="y.weight_scale_inv", **BLOCKS), "no scales"),
        (form_of((12, 24), (3, 3), dtype=torch.uint8, **BLOCKS), "two values a byte"),
        (form_of((12, 24), (3, 3), scale_dtype=torch.uint8, **BLOCKS), "scales as bytes"),
    ],
)
def test_unknown_form_is_not_taken_for_a_known_one(form: Quantized | None, what: str) -> None:
    assert form is None, what


# ---- through the jobs of an update ---------------------------------------------------


SHAPES = {"a": (10, 19), "b": (6, 19)}
NORM = "norm.weight"


class Model(nn.Module):
    """Two layers of a checkpoint in one parameter, quantized in blocks of 2 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.ab = nn.Module()
        self.ab.weight = nn.Parameter(torch.zeros(16, 19, dtype=FP8), requires_grad=False)
        self.ab.weight_scale_inv = nn.Parameter(torch.zeros(8, 3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            layer, _, kind = name.partition(".")
            if layer == "norm":
                default_weight_loader(parameters[name], tensor)
                continue
            whole = parameters[f"ab.{kind}"]
            rows = 10 if kind == "weight" else 5
            part = whole[:rows] if layer == "a" else whole[rows:]
            part.data.copy_(tensor)


def floats(version: int) -> Tensors:
    weights = {f"{name}.weight": random(*shape) + version for name, shape in SHAPES.items()}
    return {NORM: torch.full((4,), float(version), dtype=torch.bfloat16), **weights}


def as_stored(weights: Tensors) -> Tensors:
    """Return ``weights`` as the checkpoint stores them."""
    found: Tensors = {}
    for name, weight in weights.items():
        if name == NORM:
            found[name] = weight
            continue
        rows = weight.shape[0] // 2
        form = known(form_of(tuple(weight.shape), (rows, 3), weight_block_size=[2, 8]))
        values, scales = straightforward(weight, form)
        found[name] = values.to(FP8)
        found[f"{name}_scale_inv"] = scales.float()
    return found


class Rank:
    """A rank whose checkpoint is quantized, running the jobs of real updates."""

    def __init__(self, folder: Path, mode: StagingMode) -> None:
        stored = as_stored(floats(1))
        save_file(stored, folder / "model.safetensors")
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 8]}}
        (folder / "config.json").write_text(json.dumps(config))
        self.model = Model()
        self.model.load_weights(stored.items())
        runner: Any = SimpleNamespace(
            model=self.model,
            model_config=SimpleNamespace(
                model_path=str(folder),
                revision=None,
                hf_config=SimpleNamespace(),
                hf_text_config=SimpleNamespace(),
            ),
            load_config=SimpleNamespace(download_dir=None, load_format="auto"),
            weight_updater=SimpleNamespace(custom_weight_loaders=[]),
        )
        shadowed = ShadowedModel("target", runner)
        groups: Any = None
        self._jobs = Jobs(
            [shadowed],
            shadows_of([shadowed]),
            groups,
            uncounted(),
            mode=mode,
            device=torch.device("cpu"),
            rate_limit=UNPACED,
            check_finite=True,
            layout={},
        )

    def update(
        self, *calls: Tensors, partial: bool = True, load_format: str | None = None
    ) -> list[Staged]:
        """Make one update of several calls, overwriting the sender's memory after each call."""
        opened: Any = SimpleNamespace(
            update_id="u", partial=partial, may_be_empty=False, in_place=False, asks_digests=False
        )
        update = Update(opened, base_version="")
        self._jobs.prepare(update, None, after=None)
        answers = []
        for call in calls:
            sent = {name: tensor.clone() for name, tensor in call.items()}
            self._jobs.reader.read_once = lambda source, update, take: one_batch(  # type: ignore[method-assign]
                pair
                for pair in sent.items()  # noqa: B023
            )
            source = TensorSource(serialized_named_tensors=[], load_format=load_format)
            answers.append(self._jobs.fill(update, source, None))
            for tensor in sent.values():
                tensor.zero_()
        self._jobs.seal(update, None)
        assert update.sealed is not None
        update.sealed.swap.make()
        return answers

    @property
    def weights(self) -> Tensors:
        return {name: p.detach().float().clone() for name, p in self.model.named_parameters()}

    def serves(self, weights: Tensors) -> bool:
        fresh = Model()
        fresh.load_weights(as_stored(weights).items())
        return are_equal(self.weights, {n: p.float() for n, p in fresh.named_parameters()})


def are_equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


MODES = [StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF]
STAGED = [StagingMode.DEVICE, StagingMode.CHANGES]


@pytest.mark.parametrize("mode", MODES)
def test_floats_are_quantized_as_the_checkpoint_is(tmp_path: Path, mode: StagingMode) -> None:
    rank = Rank(tmp_path, mode)
    sent = floats(2)
    [staged] = rank.update(sent, partial=False)
    assert rank.serves(sent)
    # the counts are the sender's
    assert staged.tensors == len(sent)
    assert staged.bytes == sum(tensor.nbytes for tensor in sent.values())
    assert staged.quantized == {"bfloat16 to float8_e4m3fn, blocks of 2 by 8": 2}


@pytest.mark.parametrize("mode", MODES)
def test_values_and_scales_pass_as_they_are(tmp_path: Path, mode: StagingMode) -> None:
    """Two calls of one update bring them, scales first."""
    rank = Rank(tmp_path, mode)
    sent = as_stored(floats(2))
    scales = {name: sent.pop(name) for name in list(sent) if name.endswith("_inv")}
    answers = rank.update(scales, sent, partial=False)
    assert rank.serves(floats(2))
    assert [answer.quantized for answer in answers] == [{}, {}]


@pytest.mark.parametrize("mode", MODES)
def test_one_layer_of_a_fused_parameter_leaves_the_other(tmp_path: Path, mode: StagingMode) -> None:
    rank = Rank(tmp_path, mode)
    sent = {"b.weight": floats(2)["b.weight"]}
    rank.update(sent)
    assert rank.serves(floats(1) | sent)


A, A_SCALE = "a.weight", "a.weight_scale_inv"


@pytest.mark.parametrize("mode", STAGED)
@pytest.mark.parametrize("order", [(A, A_SCALE), (A_SCALE, A)])
@pytest.mark.parametrize("in_one_call", [True, False])
def test_floats_with_scales_are_refused(
    tmp_path: Path, mode: StagingMode, order: tuple[str, str], in_one_call: bool
) -> None:
    rank = Rank(tmp_path, mode)
    before = rank.weights
    both = {A: floats(2)[A], A_SCALE: as_stored(floats(2))[A_SCALE]}
    calls = [{name: both[name]} for name in order]
    if in_one_call:
        calls = [calls[0] | calls[1]]
    with pytest.raises(Refused, match=r"'a.weight' came as floats, and its scales"):
        rank.update(*calls)
    assert are_equal(rank.weights, before)


@pytest.mark.parametrize("mode", STAGED)
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("left_out", [A, A_SCALE])
def test_half_of_a_quantized_weight_is_refused(
    tmp_path: Path, mode: StagingMode, partial: bool, left_out: str
) -> None:
    rank = Rank(tmp_path, mode)
    before = rank.weights
    sent = as_stored(floats(2))
    del sent[left_out]
    if partial:
        sent = {name: sent[name] for name in sent.keys() & {A, A_SCALE}}
    with pytest.raises(Refused, match=f"belong together, and the update lacks '{left_out}'"):
        rank.update(sent, partial=partial)
    assert are_equal(rank.weights, before)


@pytest.mark.parametrize("mode", STAGED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_quantizing_does_not_hide_nan(tmp_path: Path, mode: StagingMode, value: float) -> None:
    rank = Rank(tmp_path, mode)
    before = rank.weights
    sent = floats(2)
    sent[A][9, 18] = value
    with pytest.raises(Refused, match=r"'a.weight' holds NaN or infinity"):
        rank.update(sent)
    assert are_equal(rank.weights, before)


@pytest.mark.parametrize("mode", STAGED)
def test_weight_of_another_shape_is_refused(tmp_path: Path, mode: StagingMode) -> None:
    rank = Rank(tmp_path, mode)
    with pytest.raises(Refused, match=r"'a.weight' has shape \[190\]; the model's has \[10, 19\]"):
        rank.update({A: floats(2)[A].view(-1)})


@pytest.mark.parametrize("mode", STAGED)
def test_float_of_an_unknown_name_is_not_cast_past_the_scales(
    tmp_path: Path, mode: StagingMode
) -> None:
    """The model's loader takes names that the checkpoint does not have."""
    rank = Rank(tmp_path, mode)
    before = rank.weights
    with pytest.raises(Refused, match=r"'c.weight' is torch.bfloat16, .* has scales"):
        rank.update({"c.weight": floats(2)["b.weight"]})
    assert are_equal(rank.weights, before)


@pytest.mark.parametrize("mode", STAGED)
def test_values_of_another_dtype_are_refused(tmp_path: Path, mode: StagingMode) -> None:
    rank = Rank(tmp_path, mode)
    sent = as_stored(floats(2))
    with pytest.raises(Refused, match=r"'a.weight' is int8; the served .* as float8_e4m3fn"):
        rank.update({A: sent[A].float().to(torch.int8), A_SCALE: sent[A_SCALE]})


@pytest.mark.parametrize("mode", STAGED)
def test_sparse_floats_are_refused(tmp_path: Path, mode: StagingMode) -> None:
    rank = Rank(tmp_path, mode)
    sent = {
        f"{A}.indices": torch.tensor([3]),
        f"{A}.values": torch.tensor([1.0], dtype=torch.bfloat16),
    }
    with pytest.raises(Refused, match=r"send whole tensors a\.weight"):
        rank.update(sent, load_format="sparse")


def test_refused_update_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    rank = Rank(tmp_path, StagingMode.DEVICE)
    with pytest.raises(Refused, match="belong together"):
        rank.update({A_SCALE: as_stored(floats(2))[A_SCALE]})
    rank.update(floats(3), partial=False)
    assert rank.serves(floats(3))


def test_float_for_an_unknown_form_is_refused() -> None:
    quantizer = quantizing.Quantizer({A: None})
    with pytest.raises(Refused, match=r"'a.weight' is bfloat16, and cannot be brought"):
        list(
            quantizer.quantize(
                floats(2).items(),
                check_finite=True,
                rate_limit=UNPACED,
                counts=Counter(),
            )
        )


def test_quantization_config_is_read_where_models_have_it(tmp_path: Path) -> None:
    assert read_quantization_config(tmp_path) == {}
    for config in (
        {"quantization_config": BLOCKS},
        {"compression_config": BLOCKS},
        {"text_config": {"quantization_config": BLOCKS}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_quantization_config(tmp_path) == BLOCKS
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match=r"config.json cannot be read"):
        read_quantization_config(tmp_path)


def test_shapes_and_dtypes_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    save_file(as_stored(floats(1)), tmp_path / "model.safetensors")
    assert read_stored(tmp_path)[A] == Stored((10, 19), FP8)
    assert read_stored(tmp_path)[A_SCALE] == Stored((5, 3), torch.float32)
