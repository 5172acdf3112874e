"""Serve or refuse vLLM's fields in requests to the OpenAI routes; SGLang ignores them.

A field with an equivalent in SGLang is served as in vLLM; other fields are refused by name. A
field without effect on tokens or answer, such as ``request_id``, is ignored.

``/detokenize`` answers with ``text`` for SGLang's clients and ``prompt`` for vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
)

from sglang_inflight.extensions.vllm.openai_records import OpenAIRecords
from sglang_inflight.extensions.vllm.records import Experts, wants_experts
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import AT_THE_DOOR
from sglang_inflight.hooking import AROUND, OPENAI_SERVING, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedOpenAIServing
    from sglang_inflight.sglang_types import TokenizerManager

# value, token, and the token's text
Logprob = tuple[float | None, int, str | None]

_ELSEWHERE = "SGLang has no equivalent"
_GENERATE = "use /inference/v1/generate"
_FORMATS = "use SGLang's regex, ebnf or response_format"
# refused, because ignoring one would change the tokens or the answer
_NOT_OFFERED = {
    "return_sampling_mask": _GENERATE,
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _FORMATS),
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "bad_words",
            "chat_template",
            "documents",
            "ec_transfer_params",
            "kv_transfer_params",
            "logprob_token_ids",
            "prompt_embeds",
            "repetition_detection",
            "thinking_token_budget",
            "truncate_prompt_tokens",
            "use_beam_search",
            "vllm_xargs",
            "watermarking",
        ),
        _ELSEWHERE,
    ),
}
# other values would change the prompt or the text
_OF_COMPLETIONS = {"add_special_tokens": True, "spaces_between_special_tokens": True}
_OF_CHATS = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "echo": False,
    "include_reasoning": True,
    "spaces_between_special_tokens": True,
}


class VLLMFields:
    """vLLM's fields of one request, unknown to SGLang.

    Made by the request's task. The task's context keeps the fields to the last chunk: the task
    starts the tasks that write the stream, and they inherit the context.
    """

    def __init__(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        body: Mapping[str, Any],
        tokenizer_manager: TokenizerManager,
    ) -> None:
        """Set SGLang's fields in ``request``. Raises ``Refused`` for fields without equivalent."""
        is_chat = isinstance(request, ChatCompletionRequest)
        defaults = _OF_CHATS if is_chat else _OF_COMPLETIONS
        known = type(request).model_fields
        for name, value in body.items():
            if name in known or value is None:
                continue
            if name in _NOT_OFFERED and _means_something(value):
                raise Refused(f"{name} is not offered here: {_NOT_OFFERED[name]}")
            if name in defaults and value is not defaults[name]:
                raise Refused(f"{name} must be {_as_json(defaults[name])} here: {_ELSEWHERE}")
        self.names_tokens_by_id = _flag(body, "return_tokens_as_token_ids")
        if _flag(body, "include_stop_str_in_output"):
            request.no_stop_trim = True
        if (outputs := body.get("structured_outputs")) is not None:
            _constrain(request, outputs)
        # SGLang lists more than these where the prompt's logprobs need more
        self.likeliest = 0 if is_chat else request.logprobs or 0
        self._names_tokens = is_chat and request.return_token_ids
        self._records = _records(request, body, tokenizer_manager)
        if request.stream and is_chat:
            # SGLang refuses the field in a chat's stream
            request.return_token_ids = False
        _asked.set(self)

    def finish(self, response: Any) -> Any:
        """Add records of tokens, and a chat's token ids under vLLM's names."""
        if isinstance(response, StreamingResponse) and self._records.are_wanted:
            response.body_iterator = self._records.add_to(response.body_iterator)
        if not isinstance(response, ChatCompletionResponse | CompletionResponse):
            return response
        if not self._names_tokens and not self._records.are_wanted:
            return response
        content = response.model_dump(by_alias=True)
        if self._names_tokens:
            for choice in content["choices"]:
                choice["token_ids"] = choice["response_token_ids"]
            content["prompt_token_ids"] = content["choices"][0]["prompt_token_ids"]
        if self._records.are_wanted:
            self._records.add(content)
        return ORJSONResponse(content)

    def generate(self, generate: Callable[..., AsyncGenerator[Any]], *args: Any) -> Any:
        """Return the results of SGLang's ``generate``, noted if the answer needs them."""
        return self._records.note(generate, *args) if self._records.are_wanted else generate(*args)


def _records(
    request: CompletionRequest | ChatCompletionRequest,
    body: Mapping[str, Any],
    tokenizer_manager: TokenizerManager,
) -> OpenAIRecords:
    start = body.get("routed_experts_prompt_start", 0)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise Refused(f"routed_experts_prompt_start must be a whole number, 0 or more; got {start}")
    experts = None
    if wants_experts(body.get("return_routed_experts")) and not request.stream:
        experts = Experts(tokenizer_manager.model_config).as_npy
    return OpenAIRecords(
        tokenizer_manager,
        spans=_flag(body, "return_weight_versions"),
        tokens=request.stream and request.return_token_ids,
        outputs=_flag(body, "return_output_so_far"),
        experts=experts,
        experts_start=start or request.routed_experts_start_len,
        prompt_logprobs=_prompt_logprobs(request, body, tokenizer_manager),
    )


def _prompt_logprobs(
    request: CompletionRequest | ChatCompletionRequest,
    body: Mapping[str, Any],
    tokenizer_manager: TokenizerManager,
) -> int | None:
    count = body.get("prompt_logprobs")
    if count is None:
        return None
    if not isinstance(request, CompletionRequest):
        raise Refused(f"prompt_logprobs is not offered in a chat: {_GENERATE}")
    most = tokenizer_manager.model_config.vocab_size
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
        raise Refused(f"prompt_logprobs must be a whole number from 0 to {most}; got {count}")
    if request.stream:
        raise Refused("prompt_logprobs needs stream=false: they come with a whole answer")
    return count


_asked: ContextVar[VLLMFields | None] = ContextVar("_asked", default=None)


@AT_THE_DOOR.join(order=30)
def read_fields(frontend: Frontend, asked: Asked) -> None:
    """Serve or refuse vLLM's fields of a request to an OpenAI route."""
    if isinstance(asked.request, CompletionRequest | ChatCompletionRequest):
        VLLMFields(asked.request, asked.body, frontend.tokenizer_manager)


@hook(f"{OPENAI_SERVING}.handle_request", AROUND, order=-1, when=with_us)
async def finish_answer(
    handle: Callable[..., Awaitable[Any]],
    serving: PatchedOpenAIServing,
    request: Any,
    raw_request: Any,
) -> Any:
    """Finish the answer to a request that the doors have let in."""
    answer = await handle(serving, request, raw_request)
    asked = _asked.get()
    return answer if asked is None else asked.finish(answer)


@hook(f"{TOKENIZER_MANAGER}.generate_request", AROUND, order=-1, when=with_us)
def note_results(
    generate: Callable[..., AsyncGenerator[Any]],
    tokenizer_manager: TokenizerManager,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[Any]:
    """Note the results of a request from an OpenAI route."""
    asked = _asked.get()
    if asked is None:
        return generate(tokenizer_manager, obj, request)
    return asked.generate(functools.partial(generate, tokenizer_manager), obj, request)


@hook("sglang.srt.entrypoints.openai.utils.to_openai_style_logprobs", AROUND)
def write_completion_logprobs(
    write: Callable[..., Any],
    input_token_logprobs: Sequence[Logprob] | None = None,
    output_token_logprobs: Sequence[Logprob] | None = None,
    input_top_logprobs: Sequence[Any] | None = None,
    output_top_logprobs: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> Any:
    """List the sampled token first among the top logprobs, as vLLM does even for zero of them."""
    asked = _asked.get()
    outputs, tops = output_token_logprobs, output_top_logprobs
    if asked is not None and outputs is not None:
        tops = [
            [own, *(top or ())[: asked.likeliest]]
            for own, top in zip(outputs, tops or [None] * len(outputs), strict=True)
        ]
        if asked.names_tokens_by_id:
            outputs, tops = by_id(outputs), [by_id(top) for top in tops]
    if asked is not None and input_token_logprobs is not None:
        input_top_logprobs = [top and top[: asked.likeliest] for top in input_top_logprobs or ()]
        if asked.names_tokens_by_id:
            input_token_logprobs = by_id(input_token_logprobs)
            input_top_logprobs = [top and by_id(top) for top in input_top_logprobs]
    return write(input_token_logprobs, outputs, input_top_logprobs, tops, tokenizer)


@hook(
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_token_logprobs_from_raw",
    AROUND,
)
def build_chat_logprobs(
    build: Callable[..., Any],
    serving: Any,
    output_token_logprobs: Sequence[Logprob],
    output_top_logprobs: Sequence[Any] | None,
) -> Any:
    asked = _asked.get()
    if asked is not None and asked.names_tokens_by_id:
        output_token_logprobs = by_id(output_token_logprobs)
        output_top_logprobs = [top and by_id(top) for top in output_top_logprobs or ()]
    return build(serving, output_token_logprobs, output_top_logprobs)


def by_id(logprobs: Sequence[Logprob]) -> list[Logprob]:
    return [(value, token, f"token_id:{token}") for value, token, _ in logprobs]


def _means_something(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise Refused(f"{name} must be true or false")
    return bool(value)


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _constrain(request: CompletionRequest | ChatCompletionRequest, outputs: Any) -> None:
    if not isinstance(outputs, dict):
        raise Refused("structured_outputs must be an object")
    wanted = {name: value for name, value in outputs.items() if _means_something(value)}
    for name in wanted:
        if name != "regex":
            raise Refused(f"structured_outputs.{name} is not offered here: {_FORMATS}")
    regex = wanted.get("regex")
    if regex is None:
        return
    if not isinstance(regex, str):
        raise Refused("structured_outputs.regex must be a string")
    if request.regex not in (None, regex):
        raise Refused("regex and structured_outputs.regex differ: pass only one of them")
    request.regex = regex


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return both texts: by default vLLM keeps special tokens, SGLang skips them."""
    text = await _decode(body, request)
    if not isinstance(text, DetokenizeResponse):
        return text
    prompt = text
    if "skip_special_tokens" not in body.model_fields_set:
        whole = body.model_copy(update={"skip_special_tokens": False})
        prompt = await _decode(whole, request)
        if not isinstance(prompt, DetokenizeResponse):
            return prompt
    return ORJSONResponse({"text": text.text, "prompt": prompt.text})


async def _decode(body: DetokenizeRequest, request: Request) -> Any:
    """Call SGLang's own handler; return its answer or its error response."""
    return await request.app.state.openai_serving_detokenize.handle_request(body, request)
