"""From a request's events to the spans of its answer, through SGLang's own functions."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import weight_versions as upstream

from sglang_inflight.frontend import spans as answers
from sglang_inflight.frontend.tokenizer_hooks import take_values_of_requests
from sglang_inflight.scheduler.versions import token_versions as versions
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions
from sglang_inflight.vocabulary.labels import AdapterLabel, VersionLabel

# (version, epoch, tokens) of a request in flight: an unnamed commit, a rollback, a new name
HISTORY = [("a", 0, 2), ("a", 1, 3), ("b", 2, 1), ("a", 3, 0), ("a", 4, 4), ("c", 4, 2)]
TOKENS = 12


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the spans sent by a scheduler."""
    events, made = [], 0
    for version, epoch, tokens in HISTORY[:-1]:
        made += tokens
        label = VersionLabel(epoch, version).pack()
        events.append(upstream.WeightVersionEvent(old_version=label, num_output_tokens=made))
    version, epoch, _ = HISTORY[-1]
    monkeypatch.setattr(versions, "_epoch", epoch)
    spans: list[Any] = versions.write_spans(
        upstream.compute_weight_version_spans,
        events,
        current_version=version,
        num_output_tokens=TOKENS,
    )
    return spans


def write(
    monkeypatch: pytest.MonkeyPatch, wire: list[Any], form: str, *, finished: bool, tokens: int
) -> dict[str, Any]:
    monkeypatch.setattr(answers, "as_sglang_writes_them", lambda: form == "sglang")
    meta = {"finish_reason": {"type": "length"} if finished else None, "weight_version": "now"}
    answers.write_spans(upstream.add_weight_versions_to_meta_info, meta, wire, tokens)
    return meta


def test_each_epoch_has_a_span(monkeypatch: pytest.MonkeyPatch, wire: list[Any]) -> None:
    meta = write(monkeypatch, wire, "all", finished=True, tokens=TOKENS)
    said = [(s["version"], s["epoch"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert said == [
        ("a", 0, 0, 2), ("a", 1, 2, 5), ("b", 2, 5, 6), ("a", 4, 6, 10), ("c", 4, 10, 12)
    ]  # fmt: skip
    assert meta["weight_version"] == "c"


def test_chunk_has_spans_of_its_tokens_only(
    monkeypatch: pytest.MonkeyPatch, wire: list[Any]
) -> None:
    meta = write(monkeypatch, wire, "all", finished=False, tokens=4)
    said = [(s["version"], s["epoch"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert said == [("a", 0, 0, 2), ("a", 1, 2, 4)]
    assert meta["weight_version"] == "a"


def test_sglang_form_has_sglangs_spans(monkeypatch: pytest.MonkeyPatch, wire: list[Any]) -> None:
    """SGLang's own spans of the same history, in the last chunk only."""
    chunk = write(monkeypatch, wire, "sglang", finished=False, tokens=4)
    assert chunk == {"finish_reason": None, "weight_version": "now"}

    last = write(monkeypatch, wire, "sglang", finished=True, tokens=TOKENS)
    expected: dict[str, Any] = {"finish_reason": last["finish_reason"]}
    upstream.add_weight_versions_to_meta_info(
        expected,
        [
            upstream.WeightVersionSpan(version=version, start=start, end=end)
            for version, start, end in (("a", 0, 5), ("b", 5, 6), ("a", 6, 10), ("c", 10, 12))
        ],
        TOKENS,
    )
    assert last == expected


def test_answer_without_tokens_has_an_empty_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_epoch", 7)
    wire = versions.write_spans(
        upstream.compute_weight_version_spans, [], current_version="v 1", num_output_tokens=0
    )
    meta = write(monkeypatch, wire, "all", finished=True, tokens=0)
    assert meta["weight_versions"] == [{"version": "v 1", "epoch": 7, "start": 0, "end": 0}]


def test_spans_setting_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for value in ("all", "sglang"):
        monkeypatch.setenv("SGLANG_INFLIGHT_SPANS", value)
        answers.as_sglang_writes_them.cache_clear()
        seen.append(answers.as_sglang_writes_them())
    answers.as_sglang_writes_them.cache_clear()
    assert seen == [False, True]


@pytest.mark.parametrize("value", ["all", "sglang"])
def test_kv_versions_are_given_or_removed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """SGLang must not get KV versions: it would take them for the tokens' values."""
    monkeypatch.setenv("SGLANG_INFLIGHT_SPANS", value)
    answers.as_sglang_writes_them.cache_clear()
    handed_on = []
    spans = [{"version": "v", "epoch": 0, "start": 0, "end": 3}]
    meta: dict[str, Any] = {}
    manager: Any = None

    def accumulate(_: object, meta: object, state: object, info: Any, index: int) -> None:
        handed_on.append(info)

    info: dict[str, list[Any]] = {"kv_versions": [None, spans], "theirs": [1, 2]}
    take_values_of_requests(accumulate, manager, meta, None, info, 1)
    answers.as_sglang_writes_them.cache_clear()
    assert meta == ({"kv_versions": spans} if value == "all" else {})
    assert handed_on == [{"theirs": [1, 2]}]


# ---- adapters ----------------------------------------------------------------------------


def test_adapter_and_weight_spans_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit after 2 tokens, a move after 5, a commit after 7, and a move back after 7, too."""
    adapters = AdapterVersions()
    for lora_id, version in (("one", "a"), ("two", "b")):
        adapters.remember(lora_id, AdapterLabel("policy", version))
    req = Req("r", "", array("q", [1]), SamplingParams(), lora_id="one")
    adapters.begin(req)
    for made, event in ((2, "0 v"), (5, "two"), (7, "1 v"), (7, "one")):
        req.output_ids.extend([1] * (made - len(req.output_ids)))
        if event in ("one", "two"):
            req.lora_id = event
            adapters.move(req)
        else:
            upstream.record_weight_version_events([req], old_version=event)
    # the request is queued again, after its begin
    adapters.begin(req)
    monkeypatch.setattr(versions, "_epoch", 2)
    wire = versions.write_spans(
        upstream.compute_weight_version_spans,
        req.weight_version_events,
        current_version="w",
        num_output_tokens=9,
    )
    meta = write(monkeypatch, wire, "all", finished=True, tokens=9)
    assert [(s["version"], s["epoch"], s["end"]) for s in meta["weight_versions"]] == [
        ("v", 0, 2), ("v", 1, 7), ("w", 2, 9)
    ]  # fmt: skip
    assert [(s["adapter"], s["version"], s["end"]) for s in meta["adapter_versions"]] == [
        ("policy", "a", 5), ("policy", "b", 7), ("policy", "a", 9)
    ]  # fmt: skip
    assert "adapter_versions" not in write(monkeypatch, wire, "sglang", finished=True, tokens=9)
    chunk = write(monkeypatch, wire, "all", finished=False, tokens=6)
    assert [(s["version"], s["end"]) for s in chunk["adapter_versions"]] == [("a", 5), ("b", 6)]


def test_adapter_span_without_tokens_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterVersions()
    req = Req("r", "", array("q", [1]), SamplingParams(), lora_id="one")
    adapters.remember("one", AdapterLabel("a\0b", "1"))
    adapters.begin(req)
    wire = versions.write_spans(
        upstream.compute_weight_version_spans,
        req.weight_version_events,
        current_version="v",
        num_output_tokens=0,
    )
    meta = write(monkeypatch, wire, "all", finished=True, tokens=0)
    assert meta["adapter_versions"] == [{"adapter": "a\0b", "version": "1", "start": 0, "end": 0}]
    assert [span["version"] for span in meta["weight_versions"]] == ["v"]
