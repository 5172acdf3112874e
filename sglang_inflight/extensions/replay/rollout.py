"""Recorded rollouts, as they come from files. Imports no SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglang_inflight.client.spans import Span, read_spans
from sglang_inflight.extensions.trails.prompts import digest_of
from sglang_inflight.vocabulary.errors import Refused

# records of each position, which a repetition compares if the answer has them
ROWS = ("routed_experts", "indexer_topk")
# (kind, position, …) of a trail: ``extensions/trails/trails.py`` has the kinds
Event = list[Any]
# version, epoch and end of KV that a request found in the cache
Prefix = list[tuple[str, int, int]]


class Record(msgspec.Struct):
    """``meta_info.replay`` of an answer."""

    # digest of the prompt's tokens
    prompt: str
    sampling: dict[str, Any]
    # name of the adapter
    adapter: str | None
    # the epoch in which the first forward was launched
    epoch: int
    events: list[Event]
    # version and digest of the weights, by epoch
    weights: dict[str, tuple[str, str | None]]
    server: dict[str, Any]

    def version(self, epoch: int) -> str:
        return self.weights[str(epoch)][0]

    @property
    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("arguments", {})
        return found

    @property
    def samples_alike(self) -> bool:
        """Whether logits alone decide the tokens: greedily, or by a seed."""
        if self.sampling.get("temperature") == 0 or self.sampling.get("top_k") == 1:
            return True
        is_seeded = "sampling_seed" in self.sampling
        return is_seeded and bool(self.arguments.get("enable_deterministic_inference"))


@dataclass(frozen=True)
class Rollout:
    """An answer with its record, and the prompt's tokens."""

    name: str
    prompt: list[int]
    tokens: list[int]
    # None if the answer has none
    logprobs: list[float] | None
    made_by: list[Span]
    kv: list[Span]
    # output tokens by the version of their adapter; empty without one
    adapters: list[Span]
    record: Record
    # what else the answer has of each position: base64, by its name in ``meta_info``
    rows: dict[str, str]

    @property
    def prefix(self) -> Prefix:
        """KV of the prompt that the first forward found in the cache."""
        _, begin, _ = next(event for event in self.record.events if event[0] == "prefill")
        if begin == 0:
            return []
        for event in self.record.events:
            if event[0] == "retract":
                return [(version, epoch, end) for version, epoch, end in event[2]]
        return [
            (span.version, span.epoch or 0, min(span.end, begin))
            for span in self.kv
            if span.start < begin
        ]

    @property
    def commits(self) -> int:
        return sum(event[0] == "commit" for event in self.record.events)

    @property
    def retractions(self) -> int:
        return sum(event[0] == "retract" for event in self.record.events)


def read_rollouts(path: Path) -> list[Rollout]:
    """Read a file of JSON or JSON lines, or each such file of a folder.

    An item is an answer of ``/generate`` or ``Engine.generate``, with the prompt's tokens
    (``return_prompt_token_ids``), or an object with ``request`` and ``answer``. An answer may be a
    list, as of several samples, or have choices, as on vLLM's and OpenAI's routes. Raises
    ``Refused`` for anything else.
    """
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (".json", ".jsonl"))
        if not files:
            raise Refused(f"{path} has no .json or .jsonl file")
        return [rollout for file in files for rollout in read_rollouts(file)]
    items = read_json(path)
    several = len(items) > 1
    return [
        rollout
        for number, item in enumerate(items)
        for rollout in _of_item(item, f"{path.name}:{number}" if several else path.name)
    ]


def read_json(path: Path) -> list[Any]:
    """Return the file's content, or each line's of JSON lines. Raises ``Refused``."""
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        return [json.loads(line) for line in lines if line.strip() or line is text]
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read as JSON: {error}") from error


def _of_item(item: Any, name: str) -> list[Rollout]:
    request: Mapping[str, Any] = {}
    if isinstance(item, dict) and "answer" in item:
        request, item = item.get("request") or {}, item["answer"]
    answers = item if isinstance(item, list) else [item]
    if isinstance(item, dict) and isinstance(item.get("choices"), list):
        answers = [_of_choice(item, choice) for choice in item["choices"]]
    names = [name] if len(answers) == 1 else [f"{name}[{i}]" for i in range(len(answers))]
    return [read_rollout(each, request, of) for each, of in zip(answers, names, strict=True)]


def _of_choice(answer: Mapping[str, Any], choice: Any) -> Any:
    """Return a choice of vLLM's or OpenAI's routes in the form of ``/generate``."""
    if not isinstance(choice, dict):
        return choice
    logprobs = choice.get("logprobs") or {}
    of_tokens = logprobs.get("token_logprobs") or [
        entry["logprob"] for entry in logprobs.get("content") or []
    ]
    # log probabilities over a sampling mask are none of all tokens
    is_masked = choice.get("sampling_mask") is not None
    names = ("weight_versions", "kv_versions", "adapter_versions", "replay")
    return {
        "output_ids": choice.get("token_ids"),
        "prompt_token_ids": choice.get("prompt_token_ids") or answer.get("prompt_token_ids"),
        "meta_info": {
            **{name: choice[name] for name in names if name in choice},
            "output_token_logprobs": [] if is_masked else [[of] for of in of_tokens],
        },
    }


def read_rollout(answer: Any, request: Mapping[str, Any], name: str) -> Rollout:
    """Read one answer. ``request`` has the prompt as ``input_ids``, if the answer has none.

    Raises ``Refused`` if the record or the prompt is missing, malformed, or another one's.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or "replay" not in meta:
        raise Refused(
            f"{name} has no record: ask for one by "
            '"sampling_params": {"custom_params": {"record": "replay"}}'
        )
    prompt = answer.get("prompt_token_ids") or request.get("input_ids") or request.get("token_ids")
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        raise Refused(
            f"{name} lacks the prompt's tokens: ask for return_prompt_token_ids, or store the "
            'request beside the answer as {"request": {"input_ids": [...]}, "answer": {...}}'
        )
    tokens = answer.get("output_ids")
    if not isinstance(tokens, list):
        raise Refused(f"{name} lacks the output's tokens: ask for return_token_ids")
    try:
        record = msgspec.convert(meta["replay"], Record)
    except msgspec.ValidationError as error:
        raise Refused(f"{name} has a malformed record: {error}") from error
    if digest_of(prompt) != record.prompt:
        raise Refused(f"{name} is the answer to another prompt than the one beside it")
    adapters = read_spans(meta, "adapter_versions")
    if len(adapters) > 1:
        moves = " to ".join(repr(span.version) for span in adapters)
        raise Refused(f"{name} moved from adapter version {moves}: a repetition keeps its adapter")
    logprobs = meta.get("output_token_logprobs")
    return Rollout(
        name,
        prompt,
        tokens,
        None if not logprobs else [logprob for logprob, *_ in logprobs],
        read_spans(meta),
        read_spans(meta, "kv_versions"),
        adapters,
        record,
        rows_of(meta),
    )


def rows_of(meta: Mapping[str, Any]) -> dict[str, str]:
    return {name: rows for name in ROWS if isinstance(rows := meta.get(name), str)}
