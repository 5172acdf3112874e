"""A client's stream of OpenAI's or vLLM's routes, from one server after the other.

Each chunk tells what another server needs to go on (``return_output_so_far``). The next server
writes the stream from the output's first token on, from the same tokens. So its texts begin with
those that the client has, and the client gets what is behind them.

A stream of several samples does not move: its chunks mix them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from sglang_inflight.client.answers import Json, WrongAnswer
from sglang_inflight.client.rollouts.output import (
    has_contract,
    versions_of_contract,
)
from sglang_inflight.vocabulary.so_far import OF_ALL_TOKENS, OUTPUT_SO_FAR

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
RETURN_OUTPUT = "return_output_so_far"
# lists of a completion's ``logprobs`` with an entry for each token
_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

S = TypeVar("S", str, list[Any])


class Repeated:
    """Tells what is new in a stream that a server repeats from its begin. Counts by field."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._marked: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    @property
    def fields(self) -> set[str]:
        """The fields of which the client has a part."""
        return set(self._sent)

    def begin(self) -> None:
        """Begin the stream of another server."""
        self._seen = {}

    def mark(self) -> None:
        """Remember what the client has."""
        self._marked = dict(self._sent)

    def take_back(self) -> None:
        """Forget what was new since the mark: the client did not get it."""
        self._sent = self._marked

    def new(self, field: str, part: S) -> S:
        """Return what of ``part`` the client has not got."""
        begin = self._seen.get(field, 0)
        sent = self._sent.get(field, 0)
        self._seen[field] = begin + len(part)
        self._sent[field] = max(sent, begin + len(part))
        return part[max(0, sent - begin) :]


class Relay:
    """One stream of a client, in the form of its route."""

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self.path = path
        self._body = body
        self._so_far: dict[str, list[Any]] = {}
        self._repeated = Repeated()
        self._is_first = True
        # what the client knows the stream by
        self._named: Json = {}
        self._is_begun = False
        self._new: Json = {}
        self.finish_reason: str | None = None

    @property
    def prompt(self) -> Sequence[int] | None:
        prompt = self._body.get("token_ids") or self._body.get("prompt")
        is_tokens = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
        return prompt if is_tokens else None

    @property
    def tokens(self) -> Sequence[int]:
        return self._so_far.get("token_ids", [])

    @property
    def has_contract(self) -> bool:
        return has_contract(self._contract())

    def wanted_versions(self) -> Collection[str]:
        spans = self._so_far.get("weight_versions") or ()
        return versions_of_contract(self._contract(), spans[-1]["version"] if spans else None)

    def _contract(self) -> Json:
        custom = self._body.get("custom_params") or self._sampling.get("extra_args") or {}
        return {**self._body, "sampling_params": {"custom_params": custom}}

    @property
    def _sampling(self) -> Json:
        return dict(self._body.get("sampling_params") or {})

    def next_body(self) -> Json:
        if self.finish_reason is not None:
            # the last chunk of a server that handed the request back stays here
            self._repeated.take_back()
            self.finish_reason = None
        self._is_first = True
        self._repeated.begin()
        body = {**self._body, RETURN_OUTPUT: True}
        if not self.tokens:
            return body
        if self.path == GENERATE:
            custom = {**(self._sampling.get("extra_args") or {}), OUTPUT_SO_FAR: self._so_far}
            return {**body, "sampling_params": {**self._sampling, "extra_args": custom}}
        custom = {**(body.get("custom_params") or {}), OUTPUT_SO_FAR: self._so_far}
        return {**body, "custom_params": custom}

    def take(self, chunk: Json, server: str) -> bool:
        is_new = not chunk.get("choices")
        self._repeated.mark()
        for choice in chunk.get("choices") or ():
            if (output := choice.pop(OUTPUT_SO_FAR, None)) and output.get("token_ids"):
                self._take_output(output, server)
            had = _measure(choice)
            self._trim(choice)
            # a chunk that the client has got leaves nothing
            is_new |= (had == 0 and self._is_first) or _measure(choice) > 0
            if choice.get("finish_reason") is not None:
                self.finish_reason, is_new = choice["finish_reason"], True
            for span in choice.get("weight_versions") or ():
                span.setdefault("server", server)
        if not self._named:
            self._named = {name: chunk[name] for name in ("id", "created") if name in chunk}
        self._new = {**chunk, **self._named}
        return is_new

    def _take_output(self, output: Json, server: str) -> None:
        tokens = output["token_ids"]
        for span in output.get("weight_versions") or ():
            span.setdefault("server", server)
        if self._is_first and self.tokens:
            count = len(self.tokens)
            if tokens[:count] != self.tokens:
                raise WrongAnswer(f"{server} answered with other tokens than it was given")
            self._so_far = output
        else:
            for name, values in output.items():
                if name in OF_ALL_TOKENS:
                    self._so_far[name] = values
                else:
                    self._so_far.setdefault(name, []).extend(values)
        self._is_first = False

    def _trim(self, choice: Json) -> None:
        new = self._repeated.new
        for name in ("text", "token_ids", "sampling_mask"):
            if choice.get(name):
                choice[name] = new(name, choice[name])
        if delta := choice.get("delta"):
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    delta[name] = new(name, delta[name])
            if delta.get("role") and not new("role", "r"):
                delta["role"] = None
            for call in delta.get("tool_calls") or ():
                self._trim_call(call)
        if logprobs := choice.get("logprobs"):
            for name in ("content", *_LOGPROBS):
                if isinstance(logprobs.get(name), list):
                    logprobs[name] = new(f"logprobs {name}", logprobs[name])

    def _trim_call(self, call: Json) -> None:
        """Trim a call of a tool. Each server makes another id for it."""
        place, function = call.get("index", 0), call.get("function") or {}
        if (call.get("id") or function.get("name")) and not self._repeated.new(
            f"call {place}", "c"
        ):
            call["id"] = function["name"] = None
        if function.get("arguments"):
            function["arguments"] = self._repeated.new(f"arguments {place}", function["arguments"])

    def answer(self, server: str) -> Json:
        self._is_begun = True
        return self._new

    def why_not_movable(self) -> str | None:
        samples = self._body.get("n") or self._sampling.get("n") or 1
        if samples > 1 and self._is_begun:
            return "a stream of several samples does not move"
        if self._is_begun and not self.tokens and self._repeated.fields - {"role"}:
            return "its chunks name no tokens: start the servers with SGLANG_INFLIGHT_VLLM_ROUTES=1"
        return None

    def move(self, server: str, why: str) -> None:
        """Note nothing: the spans of the tokens name their servers."""

    def restart(self) -> None:
        raise AssertionError("a stream's client keeps what it has")


def _measure(choice: Json) -> int:
    """Return how much a chunk's choice says: characters, tokens and beginnings of calls."""
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or ()
    return (
        sum(len(choice.get(name) or ()) for name in ("text", "token_ids"))
        + sum(len(delta.get(name) or ()) for name in ("content", "reasoning_content", "role"))
        + sum(len((call.get("function") or {}).get("arguments") or "") for call in calls)
        + sum(bool(call.get("id")) for call in calls)
    )
