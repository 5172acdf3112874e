"""Version contracts as requests state them: read, and folded into ``custom_params``."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_inflight.vocabulary.contracts import (
    Contract,
    fold,
    fold_into_sampling,
    given_in,
    read_contract,
)
from sglang_inflight.vocabulary.errors import Refused


@pytest.mark.parametrize(
    ("custom", "contract"),
    [
        (None, None),
        ({"max_version_lag": 2}, None),
        ({"min_epoch": None}, None),
        ("pickled", None),
        ({"min_weight_version": "042"}, Contract(min_weight_version="042")),
        ({"min_weight_version": 42, "other": []}, Contract(min_weight_version=42)),
        ({"weight_version": "v 1"}, Contract(weight_version="v 1")),
        ({"min_epoch": 0, "version_timeout_s": 2}, Contract(min_epoch=0, version_timeout_s=2.0)),
    ],
)
def test_contract_is_read_as_given(custom: Any, contract: Contract | None) -> None:
    assert read_contract(custom) == contract


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_weight_version", "v1"),
        ("min_weight_version", "1\n"),
        ("min_weight_version", -1),
        ("min_weight_version", True),
        ("min_weight_version", 1.5),
        ("exact_weight_version", 41),
        ("exact_weight_version", ""),
        ("exact_weight_version", "a\nb"),
        ("weight_version", "x" * 257),
        ("min_epoch", "1"),
        ("min_epoch", -1),
        ("min_adapter_version", "one"),
        ("exact_adapter_version", []),
        ("version_timeout_s", -1),
        ("version_timeout_s", float("inf")),
        ("version_timeout_s", float("nan")),
    ],
)
def test_wrong_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(Refused, match="version"):
        read_contract({field: value})
    with pytest.raises(Refused, match="version"):
        fold({field: value}, None)


def test_pinned_request_takes_no_other_weights() -> None:
    with pytest.raises(Refused, match="every token"):
        read_contract({"weight_version": "41", "min_epoch": 2})
    assert read_contract({"weight_version": "41", "min_adapter_version": 2}) is not None


def test_field_in_the_body_is_folded_beside_other_params() -> None:
    given = given_in({"min_epoch": 3, "weight_version": None, "text": "a"})
    assert given == {"min_epoch": 3}
    custom = {"max_version_lag": 1}
    assert fold(given, custom) == {"max_version_lag": 1, "min_epoch": 3}
    assert custom == {"max_version_lag": 1}


def test_field_given_twice_must_agree() -> None:
    assert fold({"min_epoch": 3}, {"min_epoch": 3}) == {"min_epoch": 3}
    with pytest.raises(Refused, match="min_epoch is 3 in the body and 4"):
        fold({"min_epoch": 3}, {"min_epoch": 4})


def test_batch_has_the_contract_in_each_request() -> None:
    folded = fold_into_sampling({"min_epoch": 3}, [{"temperature": 0}, {}])
    assert folded == [
        {"temperature": 0, "custom_params": {"min_epoch": 3}},
        {"custom_params": {"min_epoch": 3}},
    ]
    assert fold_into_sampling({"min_epoch": 3}, None) == {"custom_params": {"min_epoch": 3}}
    assert fold_into_sampling({}, None) is None


def test_custom_params_without_room_are_refused() -> None:
    with pytest.raises(Refused, match="min_epoch needs a custom_params"):
        fold({"min_epoch": 3}, "pickled")
