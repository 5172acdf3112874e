"""Values of the wrong type in requests: converted, or refused before they crash a scheduler.

The crashing values were found on a server without these checks.
"""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from harness.starting import ROOT
from sglang_inflight.extensions.contracts import checks as contract_checks
from sglang_inflight.extensions.records import checks as records
from sglang_inflight.frontend.requests import checks, untaken_fields
from sglang_inflight.frontend.requests.checks import check_parameters, create_tokenized
from sglang_inflight.frontend.requests.values import Prompt
from sglang_inflight.joints import Joint
from sglang_inflight.plugin import every_hook, hook_modules

VOCAB = 100
NO_CONFIG: Any = None
NO_FRONT_END: Any = None


def tokenize(sampling: dict[str, Any], **fields: Any) -> TokenizedGenerateReqInput:
    """Return a request tokenized like for ``Engine``, with no type checked earlier."""
    config = SimpleNamespace(
        vocab_size=VOCAB, hidden_size=2, hf_text_config=SimpleNamespace(vocab_size=VOCAB)
    )
    manager: Any = SimpleNamespace(model_config=config, inflight=None)
    obj: Any = GenerateReqInput(input_ids=[1, 2], sampling_params=sampling, **fields)
    obj.normalize_batch_and_arguments()

    def create(*_: Any) -> TokenizedGenerateReqInput:
        params = SamplingParams(**sampling)
        check_parameters(params, VOCAB)
        params.verify(VOCAB)
        return TokenizedGenerateReqInput(
            rid=obj.rid,
            input_text=None,
            input_ids=array("q", obj.input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=obj.return_logprob,
            logprob_start_len=obj.logprob_start_len,
            top_logprobs_num=obj.top_logprobs_num,
            token_ids_logprob=obj.token_ids_logprob,
            stream=obj.stream,
            session_id=obj.session_id,
            priority=obj.priority,
            extra_key=obj.extra_key,
            cache_salt=obj.cache_salt,
        )

    return create_tokenized(create, manager, obj, None, obj.input_ids)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("max_new_tokens", 16.0, 16),
        ("top_k", 50.0, 50),
        ("top_k", True, 1),
        # 0 means all tokens, like in vLLM and transformers
        ("top_k", 0, TOP_K_ALL),
        ("beam_width", 2.0, 2),
        ("ignore_eos", 1, True),
        ("skip_special_tokens", 0, False),
        ("logit_bias", {5: 1.0}, {"5": 1.0}),
        ("custom_params", {"a": {"b": [{"c": None}]}}, {"a": {"b": [{"c": None}]}}),
    ],
)
def test_sampling_parameter_is_converted(name: str, given: Any, taken: Any) -> None:
    found = getattr(tokenize({name: given}).sampling_params, name)
    assert (type(found), found) == (type(taken), taken)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("return_logprob", 1, True),
        ("stream", 1, True),
        ("priority", 2.0, 2),
        ("top_logprobs_num", True, 1),
    ],
)
def test_request_field_is_converted(name: str, given: Any, taken: Any) -> None:
    found = getattr(tokenize({}, **{name: given}), name)
    assert (type(found), found) == (type(taken), taken)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1.5),
        ("top_k", 1.5),
        ("top_k", math.nan),
        ("beam_width", 1.5),
        ("skip_special_tokens", "no way"),
        ("skip_special_tokens", -1),
        ("logit_bias", ""),
    ],
)
def test_crashing_sampling_parameter_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"sampling_params.{name}|{name}"):
        tokenize({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids_logprob", "x"),
        ("session_id", 1.5),
        ("priority", "x"),
        ("priority", 1.5),
        ("extra_key", 1.5),
        ("cache_salt", [1]),
    ],
)
def test_crashing_request_field_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        tokenize({}, **{name: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pp_size", 2),
        ("enable_hierarchical_cache", True),
        ("enable_flexkv", True),
        ("speculative_algorithm", "NGRAM"),
        ("speculative_eagle_topk", 2),
    ],
)
@pytest.mark.parametrize("name", ["return_routed_experts", "return_indexer_topk"])
def test_rows_that_sglang_would_mix_up_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str, value: Any
) -> None:
    settings = SimpleNamespace(
        features=SimpleNamespace(
            enable_return_routed_experts=True, enable_return_indexer_topk=True
        ),
        pp_size=1,
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        speculative_algorithm=None,
        speculative_eagle_topk=None,
        disaggregation_mode="null",
        disable_overlap_schedule=False,
    )
    getters = ("get_exec", "get_parallel", "get_memory", "get_spec", "get_disagg", "get_schedule")
    for getter in getters:
        monkeypatch.setattr(records, getter, lambda: settings)
    asked: Any = SimpleNamespace(**{name: True}, sampling_params=SamplingParams())
    prompt = Prompt(None, None, NO_CONFIG, asked)
    records.require_captured_rows(NO_FRONT_END, prompt)
    setattr(settings, setting, value)
    with pytest.raises(ValueError, match=name):
        records.require_captured_rows(NO_FRONT_END, prompt)
    # a server that captures nothing answers without rows, as in SGLang
    setattr(settings.features, f"enable_{name}", False)
    records.require_captured_rows(NO_FRONT_END, prompt)


def test_contract_of_a_diffusion_models_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps its requests in queues that no commit looks through."""
    monkeypatch.setattr(checks.MESSAGE, "_functions", ())
    checks.MESSAGE.compose([contract_checks.__name__])
    settings = SimpleNamespace(dllm=SimpleNamespace(dllm_algorithm=None))
    monkeypatch.setattr(contract_checks, "get_exec", lambda: settings)
    tokenize({"custom_params": {"exact_weight_version": "v0"}})
    settings.dllm.dllm_algorithm = "LowConfidence"
    tokenize({"custom_params": {"max_version_lag": 1}})
    with pytest.raises(ValueError, match="--dllm-algorithm"):
        tokenize({"custom_params": {"exact_weight_version": "v0"}})


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_indexers_choices_that_drafts_overwrite_are_refused(
    monkeypatch: pytest.MonkeyPatch, algorithm: str | None
) -> None:
    settings = SimpleNamespace(
        features=SimpleNamespace(enable_return_indexer_topk=True),
        speculative_algorithm=algorithm,
        disable_overlap_schedule=True,
    )
    for getter in ("get_exec", "get_spec", "get_schedule"):
        monkeypatch.setattr(records, getter, lambda: settings)
    monkeypatch.setattr(records, "why_no_rows", lambda: None)
    asked: Any = SimpleNamespace(return_indexer_topk=True, sampling_params=SamplingParams())
    prompt = Prompt(None, None, NO_CONFIG, asked)
    if algorithm is None:
        records.require_captured_rows(NO_FRONT_END, prompt)
        return
    with pytest.raises(ValueError, match="return_indexer_topk"):
        records.require_captured_rows(NO_FRONT_END, prompt)


def test_architecture_lists_the_checks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: dict[str, Iterable[Callable[..., Any]]] = {
        "AT_THE_DOOR": checks.AT_THE_DOOR,
        "PROMPT": checks.PROMPT,
        "PARAMETERS": checks.PARAMETERS,
        "MESSAGE": checks.MESSAGE,
    }
    # imports all modules
    assert every_hook()
    for each in lists.values():
        if isinstance(each, Joint):
            monkeypatch.setattr(each, "_functions", ())
            each.compose(hook_modules())
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## A request's checks")[2]
    rows = re.findall(r"^\| (?:`(\w+)`)? ?\|.*?\| `(\w+)` \|", text.partition("\n## ")[0], re.M)
    names: list[str] = list(
        itertools.accumulate((name for name, _ in rows), lambda last, new: new or last)
    )
    said = list(zip(names, (check for _, check in rows), strict=True))
    assert said == [(name, check.__name__) for name, each in lists.items() for check in each]


@pytest.mark.parametrize(
    "name", ["max_version_lag", "min_epoch", "weight_version", "forced_token_ids", "kv_lease_s"]
)
def test_field_whose_extension_is_off_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    params = SamplingParams(custom_params={name: 1})
    untaken_fields._untaken.cache_clear()
    untaken_fields.refuse_untaken_fields(params, VOCAB)
    monkeypatch.setattr(untaken_fields, "extensions_on", tuple)
    untaken_fields._untaken.cache_clear()
    with pytest.raises(ValueError, match=f"{name}: the extension that takes it is off"):
        untaken_fields.refuse_untaken_fields(params, VOCAB)
    untaken_fields._untaken.cache_clear()
