"""vLLM's ``n`` samples of one request, as SGLang's tokenizer manager gets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from sglang_inflight.extensions.vllm.generate import Generate, GenerateBody
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import find_adapter
from sglang_inflight.frontend.requests.contracts import fold_contract
from sglang_inflight.vocabulary.contracts import CUSTOM_PARAMS


def read(**sampling: Any) -> Any:
    """Return the normalized request of a body with these sampling parameters."""
    frontend: Any = SimpleNamespace(model_names=SimpleNamespace(adapter_of=lambda name: name))
    manager: Any = None
    request: Any = SimpleNamespace(headers={})
    choices: Any = SimpleNamespace(masks=False, experts=None)
    said = {
        "model": "policy",
        "token_ids": [5, 6],
        "sampling_params": sampling,
        "exact_weight_version": "v0",
    }
    body = msgspec.convert(said, GenerateBody)
    obj = Generate(manager, frontend)._read(body, "mine", request, choices)
    asked = Asked.of(obj, msgspec.structs.asdict(body), body.model)
    find_adapter(frontend, asked)
    fold_contract(frontend, asked)
    asked.put_into(obj)
    obj.normalize_batch_and_arguments()
    return obj


def test_samples_with_a_seed_are_not_all_equal() -> None:
    obj = read(n=3, seed=7, max_tokens=4)
    each = [obj[index] for index in range(3)]
    assert [one.sampling_params["sampling_seed"] for one in each] == [7, 8, 9]
    assert [one.input_ids for one in each] == [[5, 6]] * 3
    assert [one.rid for one in each] == ["mine_0", "mine_1", "mine_2"]
    assert {one.sampling_params["max_new_tokens"] for one in each} == {4}
    assert all(CUSTOM_PARAMS in one.sampling_params for one in each)
    assert [one.lora_path for one in each] == ["policy"] * 3


def test_samples_without_a_seed_are_sglangs() -> None:
    assert read(n=3).parallel_sample_num == 3
    single = read(seed=7)
    assert single.is_single
    assert single.sampling_params["sampling_seed"] == 7
