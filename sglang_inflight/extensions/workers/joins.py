"""Makes a front end one of several tokenizer workers, if its process is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sglang.srt.utils.auth import add_api_key_middleware

from sglang_inflight.extensions.aborts.aborts import Aborts
from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.workers.folder import ATTRIBUTE, OwnerEndpoint
from sglang_inflight.extensions.workers.forward import Forward, mount_abort_request
from sglang_inflight.extensions.workers.worker import Worker
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.tokenizer_hooks import FRONT_ENDS, MOUNTED
from sglang_inflight.sglang_types import get_serving

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.server_args import PortArgs
    from starlette.routing import BaseRoute

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager

# one for each manager: its app forwards calls, and its worker waits for their answers
_forwards: WeakKeyDictionary[PatchedTokenizerManager, Forward] = WeakKeyDictionary()


def _endpoint(port_args: PortArgs) -> OwnerEndpoint | None:
    return getattr(port_args, ATTRIBUTE, None)


def _forward_of(manager: PatchedTokenizerManager, endpoint: OwnerEndpoint) -> Forward:
    if manager not in _forwards:
        _forwards[manager] = Forward(endpoint.calls)
    return _forwards[manager]


@MOUNTED.join()
def forward_calls(
    app: FastAPI,
    ours: Sequence[BaseRoute],
    tokenizer_manager: PatchedTokenizerManager,
    port_args: PortArgs,
) -> None:
    if (endpoint := _endpoint(port_args)) is None:
        return
    _forward_of(tokenizer_manager, endpoint).mount(app, ours)
    mount_abort_request(app, tokenizer_manager)
    # a worker's stack was built before its manager; Starlette rebuilds a missing stack
    app.middleware_stack = None
    # with a single worker SGLang checks the admin key itself
    if (key := get_serving().admin_api_key) is not None:
        add_api_key_middleware(app, api_key=None, admin_api_key=key)


@FRONT_ENDS.join()
def become_worker(
    frontend: Frontend, tokenizer_manager: PatchedTokenizerManager, port_args: PortArgs
) -> None:
    if (endpoint := _endpoint(port_args)) is not None:
        forward = _forward_of(tokenizer_manager, endpoint)
        worker = Worker(endpoint, forward, frontend, tokenizer_manager)
        frontend.is_worker = True
        frontend.part(Aborts).on_all_workers = worker.abort
        frontend.part(Adapters).reload = worker.reload
