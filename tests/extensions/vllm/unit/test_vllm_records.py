"""Forms of experts and sampling masks for vLLM's clients."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_inflight.extensions.vllm.records import Experts, pack_masks

LAYERS, PER_TOKEN = 2, 2


def experts_of(**config: Any) -> Experts:
    text = SimpleNamespace(num_hidden_layers=LAYERS, num_experts_per_tok=PER_TOKEN, **config)
    return Experts(cast("Any", SimpleNamespace(hf_text_config=text)))


def meta(*ids: int) -> dict[str, Any]:
    encoded = base64.b64encode(np.array(ids, np.int32).tobytes()).decode()
    return {"routed_experts": encoded}


def read(packed: dict[str, Any]) -> NDArray[Any]:
    data = base64.b64decode(packed["data"])
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"num_experts": 256}, "uint8"),
        ({"n_routed_experts": 257}, "uint16"),
        ({"num_local_experts": 8}, "uint8"),
        ({"experts_by_another_name": 8}, "int32"),
    ],
)
def test_type_of_experts_is_the_models_for_every_answer(config: dict[str, Any], dtype: str) -> None:
    experts = experts_of(**config)
    for ids in ([0, 1, 2, 3], [7, 7, 7, 7, 0, 1, 2, 3]):
        expected = np.array(ids).reshape(-1, LAYERS, PER_TOKEN)
        said = experts.as_npy(meta(*ids))
        assert said is not None
        array = np.load(io.BytesIO(base64.b64decode(said)), allow_pickle=False)
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, expected)
        packed = experts.as_array(meta(*ids), start=4)
        assert packed is not None
        assert (packed["dtype"], packed["start"]) == (dtype, 4)
        np.testing.assert_array_equal(read(packed), expected)


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (1 << 16, "int32"), (-1, "int32")]
)
def test_narrow_array_has_the_type_of_its_own_ids(largest: int, dtype: str) -> None:
    """SkyRL refuses a wider type."""
    packed = experts_of(num_experts=512).as_narrow_array(meta(0, 1, 2, largest))
    assert packed is not None
    assert packed["dtype"] == dtype
    assert read(packed).flatten().tolist() == [0, 1, 2, largest]


def test_id_beyond_the_models_type_is_kept() -> None:
    packed = experts_of(num_experts=8).as_array(meta(0, 1, 2, 300), start=0)
    assert packed is not None
    assert read(packed).flatten().tolist() == [0, 1, 2, 300]


def test_answer_without_records_has_no_experts() -> None:
    experts = experts_of(num_experts=8)
    assert experts.as_npy({}) is None
    assert experts.as_array({}, start=0) is None
    assert experts.as_narrow_array({}) is None


@pytest.mark.parametrize(
    ("masks", "rows"),
    [
        ([[7], [8, 9]], [[7, -1], [8, 9]]),
        ([[7, 8, 9], [8]], [[7, 8, 9], [8, -1, -1]]),
        ([], []),
    ],
    ids=["padded", "a tie", "no tokens"],
)
def test_masks_are_rows_of_one_width(masks: list[list[int]], rows: list[list[int]]) -> None:
    packed = pack_masks(masks, width=2)
    assert packed["dtype"] == "int32"
    assert read(packed).tolist() == rows
    assert len(packed["shape"]) == 2
