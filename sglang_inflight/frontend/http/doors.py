"""The doors of HTTP's generating routes: a contract is folded in, and its request waits here.

The wait comes before the route's answer begins, so a refusal is a 503 for a stream, too. SGLang
would begin a stream with 200 first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from sglang_inflight.frontend.admission import Demand, demands_of, names_of
from sglang_inflight.frontend.contracts import fold_into_generate, fold_into_openai
from sglang_inflight.frontend.http.answer_versions import AnswerVersions
from sglang_inflight.frontend.http.endpoints import while_connected
from sglang_inflight.vocabulary.contracts import read_contract

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_inflight.frontend.frontend import Frontend


async def enter_generate(frontend: Frontend, obj: GenerateReqInput, request: Request) -> None:
    """Take a request to ``/generate``. Raises ``Refused`` for a wrong or unkept contract."""
    await fold_into_generate(obj, request)
    await enter(frontend, lambda: demands_of(obj), obj.rid, request)


async def enter_openai(frontend: Frontend, request: Any, raw_request: Any) -> None:
    """Take a request to an OpenAI route. Raises ``Refused`` as ``enter_generate``."""
    await fold_into_openai(request, raw_request)

    def demands() -> list[Demand]:
        contract = read_contract(getattr(request, "custom_params", None))
        if contract is None:
            return []
        adapter = frontend.model_names.adapter_of(request.model)
        named = adapter or request.lora_path
        return [Demand(contract, each) for each in (named if isinstance(named, list) else [named])]

    await enter(frontend, demands, getattr(request, "rid", None), raw_request)


async def enter(
    frontend: Frontend, demands: Callable[[], list[Demand]], rid: object, request: Any
) -> None:
    """Return when the request may go to the schedulers, and mark it as let through.

    The wait ends with the caller's connection. Raises ``Rejected`` or ``NotServed``.
    """
    admission = frontend.admission
    admission.require_open()
    asked = demands()
    if asked and admission.must_wait(asked):
        waiting = admission.wait(asked, names_of(rid))
        await (while_connected(request, waiting) if isinstance(request, Request) else waiting)
    AnswerVersions.of(request).is_let_through = True
