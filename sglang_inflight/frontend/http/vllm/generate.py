"""vLLM's ``/inference/v1/generate``: token ids in, token ids out.

A request is made as by SGLang's ``/generate``, and lives through pauses and updates as every
other. Each choice has vLLM's fields, and the spans of its tokens' versions.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.endpoints import describe_refusal, refusal
from sglang_inflight.messages import ADAPTER_VERSIONS
from sglang_inflight.vocabulary.bodies import Body, Name
from sglang_inflight.vocabulary.errors import InflightError, NotOffered, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.model_names import ModelNames
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

DP_RANK_HEADER = "X-data-parallel-rank"

# refused, because ignoring one would change the input
_NOT_OFFERED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
# vLLM's floor: JSON has no infinity
LOWEST = -9999.0

# value, token, and the token's text, not requested here
Logprob = tuple[float | None, int, str | None]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

# vLLM's name: SGLang's name
_SAMPLING = {
    "n": "n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "sampling_seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_new_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "stream_interval": "stream_interval",
    "logit_bias": "logit_bias",
    "extra_args": "custom_params",
}

# refused: they change the tokens, and SGLang has no equivalent or another interface
_NO_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
    "trace_decode_token_ids",
)


class Sampling(Body, kw_only=True, forbid_unknown_fields=False):
    """vLLM's sampling parameters. Other fields are ignored: they change no token."""

    n: Positive = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    # 0 and -1: all tokens
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    # None: up to the context's length
    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    # number of most likely tokens beside the sampled one; None: no logprobs at all
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: Positive | None = None
    logit_bias: dict[str, float] | None = None
    extra_args: dict[str, Any] | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    repetition_detection: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    trace_decode_token_ids: Any = None

    def for_sglang(self) -> dict[str, Any]:
        """Return SGLang's parameters. Raises ``NotOffered`` for parameters without equivalent."""
        for name in _NO_SAMPLING:
            if getattr(self, name):
                raise NotOffered(
                    f"sampling_params.{name} is not offered here: see SGLang's /generate"
                )
        if self.ignore_eos and self.stop_token_ids:
            raise NotOffered(
                "ignore_eos with stop_token_ids is not offered: SGLang ignores both kinds then"
            )
        given = {
            theirs: value
            for ours, theirs in _SAMPLING.items()
            if (value := getattr(self, ours)) is not None
        }
        return {**given, "top_k": self.top_k or -1, "max_new_tokens": self.max_tokens}

    @property
    def most_likely(self) -> int:
        """Number of most likely tokens to request from SGLang at each position."""
        # vLLM lists the sampled token first, so one logprob needs no others
        listed = self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0
        return max(listed, self.prompt_logprobs or 0)


class StreamOptions(Body, kw_only=True, forbid_unknown_fields=False):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateBody(Body, kw_only=True, forbid_unknown_fields=False):
    token_ids: Annotated[list[Count], msgspec.Meta(min_length=1)]
    sampling_params: Sampling
    request_id: Name | None = None
    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # only requests with the same salt share cached prefixes
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    priority: int = 0
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = False
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class EngineRefused(InflightError):
    """SGLang ended the request with an HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Generate:
    """Answer the route. Lives on the front end's event loop, and keeps no state."""

    def __init__(self, tokenizer_manager: TokenizerManager, model_names: ModelNames) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._model_names = model_names

    async def answer(self, request: Request) -> Response:
        try:
            body = decode(await request.body(), GenerateBody)
            rid = body.request_id or uuid.uuid4().hex
            obj = self._read(body, rid, request)
            if body.stream:
                return StreamingResponse(
                    self._stream(body, rid, obj, request),
                    media_type="text/event-stream",
                    # aborts the request if the connection ends before the stream
                    background=self._tokenizer_manager.create_abort_task(obj),
                )
            return ORJSONResponse(await self._collect(body, rid, obj, request))
        except InflightError as error:
            logger.warning("%s refused: %s", request.url.path, error)
            return refusal(error)

    def _read(self, body: GenerateBody, rid: str, request: Request) -> Any:
        for name in _NOT_OFFERED:
            if getattr(body, name):
                raise NotOffered(f"{name} is not offered here: the input is token_ids alone")
        if body.output_mode != "tokens":
            raise NotOffered("output_mode must be 'tokens' here; use SGLang's /generate for text")
        if body.priority:
            raise NotOffered("priority is not offered here; use SGLang's /generate for priorities")
        sampling = body.sampling_params
        scores_prompt = sampling.prompt_logprobs is not None
        if scores_prompt and body.stream:
            raise Refused("prompt_logprobs needs stream=false: they come with a whole answer")
        return GenerateReqInput(
            rid=rid,
            input_ids=body.token_ids,
            sampling_params=sampling.for_sglang(),
            return_logprob=sampling.logprobs is not None or scores_prompt,
            logprob_start_len=0 if scores_prompt else -1,
            top_logprobs_num=sampling.most_likely,
            stream=bool(body.stream),
            lora_path=self._model_names.adapter_of(body.model),
            cache_salt=body.cache_salt,
            routed_dp_rank=_dp_rank(request),
        )

    async def _collect(
        self, body: GenerateBody, rid: str, obj: Any, request: Request
    ) -> dict[str, Any]:
        try:
            answer = await anext(self._tokenizer_manager.generate_request(obj, request))
        except ValueError as error:
            raise EngineRefused(str(error), getattr(error, "status_code", 400)) from error
        except HTTPException as error:
            raise EngineRefused(str(error.detail), error.status_code) from error
        outputs = answer if isinstance(answer, list) else [answer]
        metas = [output["meta_info"] for output in outputs]
        sampling = body.sampling_params
        return {
            "request_id": rid,
            "model": body.model or self._tokenizer_manager.served_model_name,
            "created": int(time.time()),
            "choices": [
                describe_choice(index, output["output_ids"], output["meta_info"], sampling.logprobs)
                for index, output in enumerate(outputs)
            ],
            "usage": describe_usage(len(body.token_ids), metas),
            "prompt_logprobs": None
            if sampling.prompt_logprobs is None
            else describe_prompt(body.token_ids, metas[0]),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    async def _stream(
        self, body: GenerateBody, rid: str, obj: Any, request: Request
    ) -> AsyncIterator[bytes]:
        """Yield chunks, each with only the tokens since the previous chunk."""
        options = body.stream_options or StreamOptions()
        prompt_tokens = len(body.token_ids)
        metas: dict[int, dict[str, Any]] = {}
        sent: dict[int, int] = {}
        deltas = self._tokenizer_manager.incremental_streaming_output
        try:
            async for output in self._tokenizer_manager.generate_request(obj, request):
                index, meta = output.get("index", 0), output["meta_info"]
                reason = meta["finish_reason"]
                if reason and reason.get("status_code"):
                    raise EngineRefused(reason["message"], reason["status_code"])
                metas[index] = meta
                tokens, since = output["output_ids"], 0
                before = sent.get(index, 0)
                if not deltas:
                    # the list may have grown since SGLang wrote this chunk's meta_info
                    since = before
                    tokens = tokens[since : meta["completion_tokens"]]
                elif meta["completion_tokens"] == before:
                    # an abort repeats the last token
                    tokens = []
                sent[index] = before + len(tokens)
                if not tokens and not reason:
                    continue
                choice = describe_choice(
                    index, tokens, meta, body.sampling_params.logprobs, since=since
                )
                usage = (
                    describe_usage(prompt_tokens, [meta])
                    if options.continuous_usage_stats
                    else None
                )
                yield _event({"request_id": rid, "choices": [choice], "usage": usage})
            if options.include_usage:
                usage = describe_usage(prompt_tokens, list(metas.values()))
                yield _event({"request_id": rid, "choices": [], "usage": usage})
        except InflightError as error:
            yield _event(describe_refusal(error))
        except ValueError as error:
            if await request.is_disconnected():
                return
            status = getattr(error, "status_code", 400)
            yield _event(describe_refusal(EngineRefused(str(error), status)))
        yield b"data: [DONE]\n\n"


def _dp_rank(request: Request) -> int | None:
    """Return the rank from a router's header, or None. As in vLLM, a non-number is ignored."""
    said = request.headers.get(DP_RANK_HEADER, "")
    return int(said) if said.isdecimal() else None


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def describe_choice(
    index: int, tokens: Sequence[int], meta: dict[str, Any], logprobs: int | None, *, since: int = 0
) -> dict[str, Any]:
    """Return vLLM's choice for ``tokens``, beginning at the output's ``since``-th.

    ``weight_versions``, and with an adapter ``adapter_versions``, span the whole output so far.
    """
    reason = meta["finish_reason"]
    adapters = meta.get(ADAPTER_VERSIONS)
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": None
        if logprobs is None
        else {"content": _content(meta, logprobs, since, since + len(tokens))},
        "finish_reason": reason["type"] if reason else None,
        "weight_versions": meta.get("weight_versions"),
        **({} if adapters is None else {ADAPTER_VERSIONS: adapters}),
    }


def describe_usage(prompt_tokens: int, metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the usage of one prompt's outputs. SGLang sets no ``cached_tokens`` before a run."""
    made = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": metas[0].get("cached_tokens", 0)},
    }


def describe_prompt(token_ids: Sequence[int], meta: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Return logprobs by position: the prompt's own token first. Position 0 has none."""
    # token ids come from the prompt: SGLang reports the vocabulary's last token as 0
    sampled: list[Logprob] = [
        (value, token, text)
        for token, (value, _, text) in zip(token_ids, meta["input_token_logprobs"], strict=True)
    ]
    tops: list[list[Logprob] | None] = meta.get("input_top_logprobs") or [None] * len(sampled)
    return [
        None
        if own[0] is None
        else {str(token): _entry(value) for value, token, _ in _first(own, top or ())}
        for own, top in zip(sampled, tops, strict=True)
    ]


def _content(meta: dict[str, Any], logprobs: int, since: int, until: int) -> list[dict[str, Any]]:
    sampled: list[Logprob] = meta["output_token_logprobs"][since:until]
    tops: list[list[Logprob] | None] = [None] * len(sampled)
    if logprobs > 1:
        tops = meta["output_top_logprobs"][since:until]
    return [
        {
            **_named(own),
            "top_logprobs": [_named(each) for each in _first(own, top or ())][: max(logprobs, 1)],
        }
        for own, top in zip(sampled, tops, strict=True)
    ]


def _first(own: Logprob, others: Iterable[Logprob]) -> list[Logprob]:
    """Return a position's own token, then the others by rank."""
    return [own, *(other for other in others if other[1] != own[1])]


def _named(logprob: Logprob) -> dict[str, Any]:
    """Return a token's entry: vLLM 0.32 reads ``token``, later versions ``token_id``."""
    value, token, _ = logprob
    return {"token": f"token_id:{token}", "token_id": token, "logprob": _floored(value)}


def _entry(value: float | None) -> dict[str, Any]:
    return {"logprob": _floored(value), "rank": None, "decoded_token": None}


def _floored(value: float | None) -> float:
    return LOWEST if value is None or not math.isfinite(value) else max(value, LOWEST)
