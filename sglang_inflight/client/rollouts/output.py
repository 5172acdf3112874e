"""The output of a rollout so far, of all its servers, with log probabilities and versions.

Chunks of a stream have all tokens so far, or with ``--incremental-streaming-output`` the new ones.
The first chunk of a server that goes on with a rollout has all tokens in both forms.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_inflight.client.answers import WrongAnswer
from sglang_inflight.vocabulary.contracts import Contract
from sglang_inflight.vocabulary.so_far import LISTS, OUTPUT_SO_FAR, describe_output

# fields of a version contract that name weights
_CONTRACT = {*Contract.__struct_fields__} - {"version_timeout_s"}
# SGLang's names of what belongs to the prompt, which the first server alone computes
_OF_PROMPT = "input_"
# fields of a request whose records of earlier tokens no other server has
_WITHOUT_MOVES = ("return_sampling_mask", "return_hidden_states", "session_params", "input_embeds")


class Output:
    """One output of ``/generate``. ``moves`` has the servers before the present one."""

    path = "/generate"

    def __init__(self, body: Mapping[str, Any]) -> None:
        """``body``: of ``/generate``, for one prompt and one sample."""
        self._body = body
        self._name = body.get("rid") or uuid.uuid4().hex
        self._requests = 0
        self.tokens: list[int] = []
        self.text: str | None = None
        self.lists: dict[str, list[Any]] = {}
        self.meta: dict[str, Any] = {}
        self.moves: list[dict[str, Any]] = []
        self._of_prompt: dict[str, Any] = {}
        self._prompt_tokens: list[int] | None = None

    @property
    def prompt(self) -> Sequence[int] | None:
        return self._body.get("input_ids")

    @property
    def finish_reason(self) -> str | None:
        reason = self.meta.get("finish_reason")
        return None if reason is None else reason["type"]

    @property
    def has_contract(self) -> bool:
        return has_contract(self._body)

    def wanted_versions(self) -> set[str]:
        spans = self.meta.get("weight_versions") or ()
        return versions_of_contract(self._body, spans[-1]["version"] if spans else None)

    def take(self, chunk: Mapping[str, Any], server: str) -> bool:
        """Take a chunk from ``server``. Returns whether it has new tokens, or the end.

        Raises ``WrongAnswer`` for a chunk that does not go on where the output is.
        """
        try:
            meta, tokens = dict(chunk["meta_info"]), chunk["output_ids"]
            count, before = meta["completion_tokens"], len(self.tokens)
        except (LookupError, TypeError) as error:
            raise WrongAnswer(f"{server} sent no chunk of /generate: {error!r}") from error
        lists = {name: meta.pop(name) for name in LISTS if meta.get(name) is not None}
        is_whole = len(tokens) >= count
        if is_whole:
            # SGLang may have appended to the list since it wrote ``meta_info``
            tokens = tokens[:count]
            if tokens[:before] != self.tokens[:count]:
                raise WrongAnswer(f"{server} answered with other tokens than it was given")
            self.tokens += tokens[before:]
            self.lists = {name: values[:count] for name, values in lists.items()}
            self.text = chunk.get("text")
        elif count > before:
            if count != before + len(tokens):
                raise WrongAnswer(
                    f"{server} sent {len(tokens)} tokens behind {before}, and says {count}"
                )
            self.tokens += tokens
            for name, values in lists.items():
                self.lists.setdefault(name, []).extend(values)
            if chunk.get("text") is not None:
                self.text = (self.text or "") + chunk["text"]
        for span in meta.get("weight_versions") or ():
            span.setdefault("server", server)
        if not self.moves:
            self._of_prompt |= {n: v for n, v in meta.items() if n.startswith(_OF_PROMPT)}
        if chunk.get("prompt_token_ids") is not None:
            self._prompt_tokens = chunk["prompt_token_ids"]
        self.meta = meta
        return count > before or meta.get("finish_reason") is not None

    def move(self, server: str, why: str) -> None:
        """Note that ``server`` makes no further token."""
        begin = self.moves[-1]["end"] if self.moves else 0
        self.moves.append({"server": server, "start": begin, "end": len(self.tokens), "why": why})

    def restart(self) -> None:
        """Drop the tokens. The next server begins anew."""
        self.tokens, self.text, self.lists, self.meta = [], None, {}, {}
        self.moves, self._of_prompt = [], {}

    def why_not_movable(self) -> str | None:
        """Return why no other server can go on from these tokens, or None."""
        if not self.tokens:
            return None
        for name in _WITHOUT_MOVES:
            if self._body.get(name):
                return f"{name} needs what its first server had"
        sampling = self._body.get("sampling_params") or {}
        if (sampling.get("beam_width") or 1) > 1:
            return "a beam search has no one output"
        if (sampling.get("custom_params") or {}).get("record") is not None:
            return "a record for a replay is of one server"
        return None

    def next_body(self) -> dict[str, Any]:
        """Return the request for the next server: it goes on behind the tokens."""
        # SGLang lets one request at a time have a name, and the last one may not have ended
        rid = f"{self._name}-{self._requests}" if self._requests else self._name
        self._requests += 1
        # the end at a server that handed the request back is not the rollout's
        self.meta.pop("finish_reason", None)
        body = {**self._body, "rid": rid, "stream": True}
        if not self.tokens:
            return body
        sampling = dict(body.get("sampling_params") or {})
        custom = dict(sampling.get("custom_params") or {})
        sampling["custom_params"] = {**custom, OUTPUT_SO_FAR: self.so_far()}
        body["sampling_params"] = sampling
        body.pop("logprob_start_len", None)
        return body

    def so_far(self) -> dict[str, Any]:
        """Return the output in the form of ``output_so_far``."""
        spans = [{"epoch": 0, **span} for span in self.meta.get("weight_versions") or ()]
        return describe_output(self.tokens, {**self.meta, **self.lists, "weight_versions": spans})

    def answer(self, server: str) -> dict[str, Any]:
        """Return the output so far in the form of ``/generate``, from its first token on.

        ``meta_info.servers`` says which server made which tokens, and why the rollout left it.
        """
        begin = self.moves[-1]["end"] if self.moves else 0
        last = {"server": server, "start": begin, "end": len(self.tokens)}
        said: dict[str, Any] = {
            "output_ids": list(self.tokens),
            "meta_info": {
                **self.meta,
                **self._of_prompt,
                **{name: list(values) for name, values in self.lists.items()},
                "id": self._name,
                "servers": [*self.moves, last],
            },
        }
        if self.text is not None:
            said["text"] = self.text
        if self._prompt_tokens is not None:
            said["prompt_token_ids"] = self._prompt_tokens
        return said


def has_contract(body: Mapping[str, Any]) -> bool:
    """Whether a body of ``/generate`` says which weights it takes."""
    custom = (body.get("sampling_params") or {}).get("custom_params") or {}
    return any(body.get(name, custom.get(name)) is not None for name in _CONTRACT)


def versions_of_contract(body: Mapping[str, Any], served: str | None) -> set[str]:
    """Return the versions that a rollout's next server should serve, by contract or so far.

    ``served``: the version that has made the last token.
    """
    sampling = body.get("sampling_params") or {}
    custom = sampling.get("custom_params") or {}
    names = {
        str(value)
        for field in ("weight_version", "exact_weight_version")
        if (value := body.get(field, custom.get(field))) is not None
    }
    if names or served is None:
        return names
    return {served}
