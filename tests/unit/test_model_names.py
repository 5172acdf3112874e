"""Adapter or served model for a request's model name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_inflight.frontend.requests.model_names import ModelNames
from sglang_inflight.vocabulary.errors import NotFound, Refused

LOADED = ("policy", "a:b", "served", "s3://bucket/other")


def names(*adapters: str, known_only: bool = True, **manager: Any) -> tuple[ModelNames, Any]:
    """Names of a server started on ``/ckpt/base`` and updated from disk to ``/ckpt/step-42``."""
    tokenizer_manager = SimpleNamespace(
        served_model_name="s3://bucket/model",
        model_path="/ckpt/base",
        lora_registry=SimpleNamespace(_registry=dict.fromkeys(adapters)),
        lora_ref_cache={"evicted": None},
        **manager,
    )
    found = ModelNames(cast("Any", tokenizer_manager), known_only=known_only)
    tokenizer_manager.model_path = "/ckpt/step-42"
    return found, tokenizer_manager


@pytest.mark.parametrize(
    "model",
    [None, "", "default", "s3://bucket/model", "/ckpt/base", "/ckpt/step-42", "default:", ":"],
)
def test_name_of_served_model_gets_no_adapter(model: str | None) -> None:
    assert names(*LOADED)[0].adapter_of(model) is None


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("policy", "policy"),
        ("evicted", "evicted"),
        ("a:b", "a:b"),
        ("s3://bucket/other", "s3://bucket/other"),
        ("s3://bucket/model:policy", "policy"),
        ("/ckpt/base: policy ", "policy"),
        ("/ckpt/step-42:a:b", "a:b"),
        ("default:policy", "policy"),
        (":policy", "policy"),
    ],
)
def test_name_of_an_adapter_gets_adapter(model: str, adapter: str) -> None:
    assert names(*LOADED)[0].adapter_of(model) == adapter


@pytest.mark.parametrize(
    "model",
    ["gpt-4", "polic", "policy2", "/ckpt/step-41", "default:gone", "gpt-4:policy", "s3://x", "a"],
)
def test_unknown_model_name_is_not_found(model: str) -> None:
    with pytest.raises(NotFound, match="does not exist") as refused:
        names(*LOADED)[0].adapter_of(model)
    assert repr(model) in str(refused.value)


def test_adapter_may_take_served_models_name() -> None:
    """vLLM's trainers load and request an adapter under the served model's name."""
    found, tokenizer_manager = names()
    served = tokenizer_manager.served_model_name
    assert found.adapter_of(served) is None
    tokenizer_manager.lora_registry._registry[served] = None
    assert found.adapter_of(served) == served
    assert found.adapter_of("default") is None


def test_ambiguous_default_is_refused() -> None:
    """SGLang reads a body without a model as "default"."""
    found, _ = names("default")
    with pytest.raises(Refused, match="s3://bucket/model:default"):
        found.adapter_of("default")
    assert found.adapter_of("s3://bucket/model:default") == "default"
    assert found.adapter_of("s3://bucket/model") is None


def test_any_model_name_is_served_when_allowed() -> None:
    """Loaded adapters are still found by name, and an absent adapter is still an error."""
    found, _ = names(*LOADED, known_only=False)
    assert found.adapter_of("gpt-4") is None
    assert found.adapter_of("policy") == "policy"
    assert found.adapter_of("gpt-4:policy") == "policy"
    with pytest.raises(NotFound):
        found.adapter_of("gpt-4:gone")
