"""The checks that may refuse a request, in their order.

**At the door** (``AT_THE_DOOR``). Each route has a door (``doors.py``, and extensions for routes of
their own). A door describes its request (``asked.py``), awaits ``admit``, and turns an
``InflightError`` into its route's answer.

**At the tokenizer**, for each prompt of the call: the prompt (``PROMPT``), its sampling parameters
(``PARAMETERS``), and what would go to the schedulers (``MESSAGE``). A check raises ``ValueError``:
a 400 over HTTP, the error itself from ``Engine``. SGLang's own checks come between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.answer_versions import AnswerVersions
from sglang_inflight.frontend.http.endpoints import while_connected
from sglang_inflight.frontend.requests import contracts, kv_age, untaken_fields, values
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.hooking import (
    AROUND,
    BEFORE,
    SAMPLING_PARAMS,
    TOKENIZER_MANAGER,
    hook,
    with_us,
)
from sglang_inflight.joints import Joint
from sglang_inflight.sglang_types import get_disagg
from sglang_inflight.vocabulary.errors import Behind, Refused, Rejected

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager

# raises ``Refused``, or returns what the request must await
DoorCheck = Callable[[Frontend, Asked], Awaitable[None] | None]
PromptCheck = Callable[[Frontend, values.Prompt], None]


def find_adapter(frontend: Frontend, asked: Asked) -> None:
    """Set the adapter that the model's name means. Raises ``NotFound`` for an unknown name."""
    adapter = frontend.model_names.adapter_of(asked.model)
    if adapter is None:
        return
    if asked.adapters is None:
        raise Refused(no_adapters(asked.model, f"a {type(asked.request).__name__}"))
    for name in asked.adapters:
        if name and name != adapter:
            raise Refused(
                f"model names the adapter {adapter!r}, and lora_path {name!r}: pass only one"
            )
    asked.adapters = [adapter] * len(asked.adapters)


def no_adapters(model: str | None, where: str) -> str:
    return (
        f"the model {model!r} is an adapter, and SGLang serves {where} without adapters: use "
        "/v1/chat/completions, /v1/completions, /v1/embeddings or /generate"
    )


def require_open(frontend: Frontend, _: Asked) -> None:
    """Raise ``Rejected`` while a held pause rejects new requests, ``Behind`` for a version.

    A prefill server takes requests of every version of its fleet: a decode server may send it
    running requests, to recompute their KV.
    """
    behind = frontend.why_behind
    if behind is not None and get_disagg().disaggregation_mode != "prefill":
        raise Behind(
            f"{behind}. Send the request to another server, or again later",
            frontend.versions.first,
        )
    if frontend.pauses.rejects:
        raise Rejected(
            'generation is paused with new_requests="reject": send the request to another '
            "server, or again later",
            frontend.versions.first,
        )


AT_THE_DOOR: Joint[DoorCheck] = Joint(
    "checks at the door",
    {
        # 404, or 400 for a request that takes no adapter
        10: find_adapter,
        # 400
        20: contracts.fold_contract,
        # 503 from here on: the request may succeed elsewhere, or later
        50: require_open,
    },
)
PROMPT: Sequence[PromptCheck] = (
    values.require_tokens,
    values.require_options,
    values.require_positions,
    values.require_public_name,
)
PARAMETERS: Joint[Callable[[SamplingParams, int], None]] = Joint(
    "checks of sampling parameters",
    {
        10: values.check_sampling,
        30: contracts.check_contract,
        45: kv_age.check_kv_max_age,
        50: untaken_fields.refuse_untaken_fields,
    },
)
MESSAGE: Joint[PromptCheck] = Joint(
    "checks of tokenized prompts",
    {
        10: values.require_overrides,
        30: values.require_types,
        60: kv_age.require_ages,
    },
)


async def admit(frontend: Frontend, asked: Asked, request: Any = None) -> None:
    """Return when the request may go to the schedulers, and let it pass the last door at once.

    A wait ends with the connection of an HTTP ``request``. Raises the ``InflightError`` of the
    first check that refuses the request.
    """
    for check in AT_THE_DOOR:
        waiting = check(frontend, asked)
        if waiting is not None:
            is_http = isinstance(request, Request)
            await (while_connected(request, waiting) if is_http else waiting)
            # a pause may have begun meanwhile
            require_open(frontend, asked)
    AnswerVersions.of(request).is_let_through = True


@hook(f"{SAMPLING_PARAMS}.verify", BEFORE)
def check_parameters(params: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters before SGLang's own checks. Servers without us check a few."""
    for check in PARAMETERS:
        check(params, vocab_size)


@hook(f"{TOKENIZER_MANAGER}._create_tokenized_object", AROUND, when=with_us)
def create_tokenized(
    create: Callable[..., Any],
    tokenizer_manager: PatchedTokenizerManager,
    obj: Any,
    input_text: Any,
    input_ids: Sequence[int] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Check a prompt around the last step before it is sent."""
    frontend = tokenizer_manager.inflight
    prompt = values.Prompt(obj, input_ids, tokenizer_manager.model_config)
    for check in PROMPT:
        check(frontend, prompt)
    message = create(tokenizer_manager, obj, input_text, input_ids, *args, **kwargs)
    prompt = prompt._replace(message=message)
    for check in MESSAGE:
        check(frontend, prompt)
    return message
