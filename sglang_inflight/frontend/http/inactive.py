"""HTTP of a server that runs without us: SGLang's routes answer as in SGLang.

Our own routes answer 501 with the reason. So do calls of SGLang's routes with fields of ours,
because SGLang would silently ignore these fields.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware

from sglang_inflight.frontend.as_sglang import our_fields
from sglang_inflight.frontend.http.endpoints import Content, guarded
from sglang_inflight.frontend.http.refused_fields import RefuseFields
from sglang_inflight.frontend.requests.contracts import REFUSED as CONTRACTS_REFUSED
from sglang_inflight.frontend.requests.contracts import TAKEN as CONTRACTS_TAKEN
from sglang_inflight.vocabulary.answers import Inactive
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.contracts import Contract
from sglang_inflight.vocabulary.errors import NotOffered

_ROUTES = [(call.path, call) for call in TABLE.values() if call.path is not None]
# routes of ours, missing in SGLang
ROUTES = tuple(
    (path, call.method)
    for path, call in _ROUTES
    if call.body.sglang is None and call.name != "inflight_status"
)
# routes of SGLang, with fields of ours in their bodies
BODIES = {
    path: call.body
    for path, call in _ROUTES
    if call.body.sglang is not None and our_fields(call.body)
}


def mount(app: FastAPI, why: str) -> None:
    """Answer ``why`` on our routes, and to bodies with our fields."""

    async def status() -> Content:
        return Inactive(message=why)

    async def refuse() -> Content:
        raise NotOffered(why)

    router = APIRouter(tags=["inflight"])
    router.add_api_route("/inflight/status", guarded(status), methods=["GET"])
    for path, method in ROUTES:
        router.add_api_route(path, guarded(refuse), methods=[method], include_in_schema=False)
    app.router.routes[:0] = router.routes
    # the last middleware is the innermost: behind the check of API keys
    app.user_middleware.append(
        Middleware(
            RefuseFields,
            shapes={
                **dict.fromkeys((*CONTRACTS_TAKEN, *CONTRACTS_REFUSED), Contract),
                **BODIES,
            },
            refuse=lambda names: NotOffered(f"{', '.join(names)}: {why}"),
        )
    )
