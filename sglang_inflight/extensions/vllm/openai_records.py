"""Add records of tokens to SGLang's answers on the OpenAI routes, where vLLM's clients read them.

SGLang's answers have only some of ``meta_info``. So its results are noted on their way to SGLang's
handler, and added to what the handler writes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.extensions.vllm.choices import describe_prompt
from sglang_inflight.extensions.vllm.records import (
    NewTokens,
    spans_of,
)
from sglang_inflight.vocabulary.so_far import OF_ALL_TOKENS, OUTPUT_SO_FAR, describe_output

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_inflight.sglang_types import TokenizerManager

_DATA = b"data: "


@dataclass
class _Choice:
    """Results of one choice: the latest, and tokens not written yet."""

    output: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    # what another server needs of the tokens not written yet
    unwritten: dict[str, list[Any]] = field(default_factory=dict)

    def note_output(self, tokens: list[int], since: int) -> None:
        """Note new tokens, the first of which is at ``since`` in the lists of ``meta``."""
        for name, values in describe_output(tokens, self.meta, since).items():
            if name in OF_ALL_TOKENS:
                self.unwritten[name] = values
            else:
                self.unwritten.setdefault(name, []).extend(values)

    def take_output(self) -> dict[str, list[Any]]:
        taken, self.unwritten = self.unwritten, {}
        return taken

    @property
    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.output["meta_info"]
        return meta


class OpenAIRecords:
    """Records of one answer. Lives as long as the answer, on the front end's event loop.

    ``spans``: spans of versions, at the end of each choice. ``tokens``: a stream's token ids.
    ``experts`` takes ``meta_info`` and returns what a choice of a whole answer has; a stream has
    no experts, as in vLLM. The first ``experts_start`` tokens of the prompt are left out of them.
    ``outputs``: what another server needs to go on with a choice, in each of its chunks.
    ``prompt_logprobs``: number of likeliest tokens at each position of the prompt, beside its own
    token; None for no logprobs of the prompt. A stream has none, as in vLLM.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        *,
        spans: bool,
        tokens: bool,
        outputs: bool,
        experts: Callable[[dict[str, Any]], Any] | None,
        experts_start: int,
        prompt_logprobs: int | None,
    ) -> None:
        self._new = NewTokens(tokenizer_manager)
        self._spans = spans
        self._tokens = tokens
        self._outputs = outputs
        self._experts = experts
        self._experts_start = experts_start
        self._prompt_logprobs = prompt_logprobs
        self._choices: dict[int, _Choice] = {}

    @property
    def are_wanted(self) -> bool:
        return (
            self._spans
            or self._tokens
            or self._outputs
            or self._experts is not None
            or self._prompt_logprobs is not None
        )

    async def note(
        self, generate: Callable[..., AsyncGenerator[Any]], obj: GenerateReqInput, *args: Any
    ) -> AsyncGenerator[Any]:
        """Yield what ``generate`` yields for ``obj``, and note it."""
        if self._tokens:
            obj.return_prompt_token_ids = True
        if self._experts is not None:
            obj.return_routed_experts = True
            obj.routed_experts_start_len = self._experts_start
        if self._prompt_logprobs is not None:
            obj.return_prompt_token_ids = True
            # nobody reads the texts of a prompt's likeliest tokens, and there may be thousands
            obj.return_text_in_logprobs = bool(obj.return_logprob)
            obj.return_logprob = True
            obj.logprob_start_len = 0
            # the OpenAI routes ask for all their prompts at once
            assert isinstance(obj.top_logprobs_num, int)
            obj.top_logprobs_num = max(obj.top_logprobs_num, self._prompt_logprobs)
        async with aclosing(generate(obj, *args)) as results:
            async for result in results:
                outputs = result if isinstance(result, list) else [result]
                for position, output in enumerate(outputs):
                    choice = self._choices.setdefault(output.get("index", position), _Choice())
                    choice.output = output
                    if self._tokens or self._outputs:
                        tokens, since = self._new.take(output)
                        choice.tokens += tokens
                    if self._outputs:
                        choice.note_output(tokens, since)
                yield result

    def add(self, content: dict[str, Any]) -> None:
        """Add the records to a whole answer."""
        for said in content["choices"]:
            choice = self._choices[said["index"]]
            meta = choice.meta
            if self._prompt_logprobs is not None:
                said["prompt_logprobs"] = describe_prompt(
                    choice.output["prompt_token_ids"], meta, self._prompt_logprobs
                )
            if self._experts is not None:
                said["routed_experts"] = self._experts(meta)
            if self._spans:
                said |= spans_of(meta)
            if self._outputs:
                said[OUTPUT_SO_FAR] = describe_output(choice.output["output_ids"], meta)

    async def add_to(self, events: AsyncIterable[Any]) -> AsyncGenerator[Any]:
        """Yield a stream's events with the records."""
        async for event in events:
            yield self._add_to(event)

    def _add_to(self, event: str | bytes) -> str | bytes:
        encoded = event.encode() if isinstance(event, str) else event
        if not encoded.startswith(_DATA + b"{"):
            # the end, or an event of a kind of its own
            return event
        content = msgspec.json.decode(encoded[len(_DATA) :])
        for said in content.get("choices", ()):
            choice = self._choices[said["index"]]
            if self._tokens and said.get("delta", {}).get("role"):
                # a chat's first chunk, before the first token's text
                content["prompt_token_ids"] = choice.output["prompt_token_ids"]
            elif self._tokens:
                said["token_ids"], choice.tokens = choice.tokens, []
            if self._spans and said.get("finish_reason") is not None:
                said |= spans_of(choice.meta)
            if self._outputs:
                said[OUTPUT_SO_FAR] = choice.take_output()
        return _DATA + msgspec.json.encode(content) + b"\n\n"
