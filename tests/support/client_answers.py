"""Answers of SGLang's own route and of OpenAI's, put together the way clients do.

A stream of increments, a stream that repeats all tokens so far, and a whole answer become equal.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.server import PLAIN, Server
from harness.streams import read_event
from tests.support.load import PATIENCE_S

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
# lists about a chunk's own tokens only, in a stream of increments
PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


@dataclass
class Answer:
    """A client's complete answer."""

    text: str = ""
    # SGLang's own route only
    tokens: list[int] = field(default_factory=list)
    # log-probability of each token
    logprobs: list[float] = field(default_factory=list)
    # lengths of the per-token lists
    per_token: dict[str, int] = field(default_factory=dict)
    hidden_states: Any = None
    finish: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    # SGLang's own route only
    meta: dict[str, Any] = field(default_factory=dict)


class Asked:
    """A request and a thread reading its answer.

    ``increments`` says that the server runs with ``--incremental-streaming-output``.
    """

    def __init__(
        self, server: Server, path: str, body: dict[str, Any], *, increments: bool
    ) -> None:
        self._path, self._body, self._increments = path, body, increments
        self._server = server
        self._answer = Answer()
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_tokens(self, n: int) -> None:
        """Wait until a stream of SGLang's own route has ``n`` tokens."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self._answer.tokens) >= n or not self._thread.is_alive(), PATIENCE_S
            ), f"{len(self._answer.tokens)} tokens, not {n}"

    @property
    def count(self) -> int:
        with self._changed:
            return len(self._answer.tokens)

    def answer(self) -> Answer:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self._path}: no end after {PATIENCE_S:g} s"
        if self._error is not None:
            raise self._error
        return self._answer

    def _read(self) -> None:
        try:
            with (
                httpx.Client(timeout=None, **PLAIN) as client,
                client.stream("POST", self._server.url + self._path, json=self._body) as response,
            ):
                if not self._body["stream"] or response.status_code != 200:
                    content = response.read()
                    assert response.status_code == 200, content
                    self._take(json.loads(content), whole=True)
                    return
                for line in response.iter_lines():
                    if (event := read_event(line)) is not None:
                        self._take(event, whole=False)
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, content: dict[str, Any], *, whole: bool) -> None:
        with self._changed:
            if self._path == GENERATE:
                self._take_generated(content, adds=self._increments and not whole)
            else:
                self._take_openai(content)
            self._changed.notify_all()

    def _take_generated(self, content: dict[str, Any], *, adds: bool) -> None:
        answer, meta = self._answer, content["meta_info"]
        if not adds:
            answer.text, answer.tokens, answer.per_token, answer.logprobs = "", [], {}, []
        answer.text += content["text"]
        answer.tokens = answer.tokens + content["output_ids"]
        for name in PER_TOKEN:
            if name in meta:
                answer.per_token[name] = answer.per_token.get(name, 0) + len(meta[name])
        answer.logprobs += [logprob for logprob, *_ in meta.get("output_token_logprobs", ())]
        answer.hidden_states = meta.get("hidden_states")
        answer.meta = meta
        if meta["finish_reason"] is not None:
            answer.finish = meta["finish_reason"]["type"]
            answer.usage = {
                "prompt_tokens": meta["prompt_tokens"],
                "completion_tokens": meta["completion_tokens"],
            }

    def _take_openai(self, content: dict[str, Any]) -> None:
        answer = self._answer
        if content.get("usage") is not None:
            usage = content["usage"]
            answer.usage = {n: usage[n] for n in ("prompt_tokens", "completion_tokens")}
        for choice in content["choices"]:
            said = choice.get("delta") or choice.get("message")
            answer.text += (choice["text"] if said is None else said.get("content")) or ""
            answer.finish = choice["finish_reason"] or answer.finish
            answer.hidden_states = choice.get("hidden_states") or answer.hidden_states
            logprobs = choice.get("logprobs") or {}
            if self._path == CHAT:
                answer.logprobs += [each["logprob"] for each in logprobs.get("content") or ()]
            else:
                answer.logprobs += logprobs.get("token_logprobs", ())
