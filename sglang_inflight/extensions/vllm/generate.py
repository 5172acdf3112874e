"""vLLM's ``/inference/v1/generate``: token ids in, token ids out.

A request is made as by SGLang's ``/generate``, and lives through pauses and updates as every
other. Each choice has vLLM's fields, and the spans of its tokens' versions.

SkyRL's own server has the route as ``/skyrl/v1/generate``, with arrays in a form of its own.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_inflight.extensions.vllm import VLLMSettings
from sglang_inflight.extensions.vllm.choices import Choices, describe_prompt, describe_usage
from sglang_inflight.extensions.vllm.records import Experts, NewTokens, wants_experts
from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.endpoints import describe_refusal, refusal
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import admit
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.bodies import Body, Name
from sglang_inflight.vocabulary.contracts import Contract
from sglang_inflight.vocabulary.errors import InflightError, NotOffered, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.frontend import Frontend
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

DP_RANK_HEADER = "X-data-parallel-rank"

# refused, because ignoring one would change the input
_NOT_OFFERED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
# SkyRL's, refused, because its trainer needs them in the answer
_NOT_RECORDED = ("return_full_logprobs", "return_sample_support_logprobs")
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
    # tokens of the prompt to leave out of routed_experts
    routed_experts_prompt_start: Count = 0
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    repetition_detection: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    # the tokens of the answer, as far as the context has room for them
    trace_decode_token_ids: list[Count] | None = None

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
    def others(self) -> int:
        """Number of most likely tokens listed beside each sampled one.

        vLLM lists the sampled token first, so one logprob needs no others.
        """
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class StreamOptions(Body, kw_only=True, forbid_unknown_fields=False):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateBody(Contract, kw_only=True, forbid_unknown_fields=False):
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
    return_output_so_far: bool | None = False
    # None: as the server is set up, which is vLLM's only way
    return_routed_experts: bool | None = None
    return_sampling_mask: bool | None = None
    # SkyRL's name of return_sampling_mask
    return_sample_support: bool | None = None
    return_sample_support_logprobs: Any = None
    return_full_logprobs: Any = None
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
    """Answer the route. Lives on the front end's event loop, and keeps no state of requests."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        frontend: Frontend,
        *,
        for_skyrl: bool = False,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._frontend = frontend
        self._settings = read(VLLMSettings)
        self._for_skyrl = for_skyrl

    async def answer(self, request: Request) -> Response:
        try:
            body = decode(await request.body(), GenerateBody)
            rid = body.request_id or uuid.uuid4().hex
            choices = self._choices(body)
            obj = self._read(body, rid, request, choices)
            asked = Asked.of(obj, msgspec.structs.asdict(body), body.model)
            await admit(self._frontend, asked, request)
            asked.put_into(obj)
            if body.stream:
                return StreamingResponse(
                    self._stream(body, rid, obj, request, choices),
                    media_type="text/event-stream",
                    # aborts the request if the connection ends before the stream
                    background=self._tokenizer_manager.create_abort_task(obj),
                )
            return ORJSONResponse(await self._collect(body, rid, obj, request, choices))
        except InflightError as error:
            logger.warning("%s refused: %s", request.url.path, error)
            return refusal(error)

    def _choices(self, body: GenerateBody) -> Choices:
        """Read what the answer's choices have. Raises ``Refused`` for what cannot be recorded."""
        for name in _NOT_RECORDED:
            if getattr(body, name):
                raise NotOffered(f"{name} is not offered here")
        sampling = body.sampling_params
        start = sampling.routed_experts_prompt_start
        if start > len(body.token_ids):
            raise Refused(
                f"sampling_params.routed_experts_prompt_start is {start}, and the prompt has "
                f"{len(body.token_ids)} tokens"
            )
        masks = body.return_sampling_mask
        if masks is None:
            masks = body.return_sample_support
        if masks is None:
            masks = self._settings.vllm_sampling_masks
        return Choices(
            logprobs=sampling.logprobs,
            masks=masks,
            outputs=bool(body.return_output_so_far),
            experts=self._experts(start) if wants_experts(body.return_routed_experts) else None,
            columns=max(sampling.top_k or 1, 1) if self._for_skyrl else None,
        )

    def _experts(self, start: int) -> Callable[[dict[str, Any]], Any]:
        experts = Experts(self._tokenizer_manager.model_config)
        if self._for_skyrl:
            return experts.as_narrow_array
        if self._settings.vllm_routed_experts == "array":
            return lambda meta: experts.as_array(meta, start)
        return experts.as_npy

    def _read(self, body: GenerateBody, rid: str, request: Request, choices: Choices) -> Any:
        for name in _NOT_OFFERED:
            if getattr(body, name):
                raise NotOffered(f"{name} is not offered here: the input is token_ids alone")
        if body.output_mode != "tokens":
            raise NotOffered("output_mode must be 'tokens' here; use SGLang's /generate for text")
        if body.priority:
            raise NotOffered("priority is not offered here; use SGLang's /generate for priorities")
        sampling = body.sampling_params
        params: Any = sampling.for_sglang()
        if trace := sampling.trace_decode_token_ids:
            room = self._tokenizer_manager.context_len - len(body.token_ids)
            forced = {"forced_token_ids": trace[: max(room, 0)]}
            params["custom_params"] = (sampling.extra_args or {}) | forced
        scores_prompt = sampling.prompt_logprobs is not None
        if scores_prompt and body.stream:
            raise Refused("prompt_logprobs needs stream=false: they come with a whole answer")
        return GenerateReqInput(
            rid=rid,
            input_ids=body.token_ids,
            sampling_params=params,
            return_logprob=sampling.logprobs is not None or scores_prompt,
            logprob_start_len=0 if scores_prompt else -1,
            top_logprobs_num=max(sampling.others, sampling.prompt_logprobs or 0),
            return_sampling_mask=choices.masks,
            sampling_logprobs_mode="support" if choices.masks and sampling.others else None,
            return_routed_experts=choices.experts is not None,
            routed_experts_start_len=sampling.routed_experts_prompt_start,
            stream=bool(body.stream),
            cache_salt=body.cache_salt,
            routed_dp_rank=_dp_rank(request),
        )

    async def _collect(
        self, body: GenerateBody, rid: str, obj: Any, request: Request, choices: Choices
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
                choices.describe(index, output["output_ids"], output["meta_info"])
                for index, output in enumerate(outputs)
            ],
            "usage": describe_usage(len(body.token_ids), metas),
            "prompt_logprobs": None
            if sampling.prompt_logprobs is None
            else describe_prompt(body.token_ids, metas[0], sampling.prompt_logprobs),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    async def _stream(
        self, body: GenerateBody, rid: str, obj: Any, request: Request, choices: Choices
    ) -> AsyncIterator[bytes]:
        """Yield chunks, each with only the tokens since the previous chunk."""
        options = body.stream_options or StreamOptions()
        prompt_tokens = len(body.token_ids)
        metas: dict[int, dict[str, Any]] = {}
        prompt = body.token_ids if body.return_token_ids else None
        new = NewTokens(self._tokenizer_manager)
        try:
            async for output in self._tokenizer_manager.generate_request(obj, request):
                index, meta = output.get("index", 0), output["meta_info"]
                reason = meta["finish_reason"]
                if reason and reason.get("status_code"):
                    raise EngineRefused(reason["message"], reason["status_code"])
                metas[index] = meta
                tokens, since = new.take(output)
                if not tokens and not reason:
                    continue
                choice = choices.describe(index, tokens, meta, since=since)
                usage = (
                    describe_usage(prompt_tokens, [meta])
                    if options.continuous_usage_stats
                    else None
                )
                said: dict[str, Any] = {"request_id": rid, "choices": [choice], "usage": usage}
                if prompt is not None:
                    # the first chunk alone has them
                    said["prompt_token_ids"], prompt = prompt, None
                yield _event(said)
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
