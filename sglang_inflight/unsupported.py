"""What SGLang can do and we cannot: refused at start or at the call, never half done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.environ import envs

from sglang_inflight.settings import Settings
from sglang_inflight.upstream.runtime_context import get_disagg, get_exec, get_model, get_parallel

if TYPE_CHECKING:
    from sglang_inflight.upstream.server_args import ServerArgs

ONE_TOKENIZER = (
    "SGLang Inflight needs --tokenizer-worker-num 1: SGLang loads no plugins in "
    "further tokenizer workers"
)
ONE_NODE = "SGLang Inflight needs --nnodes 1: ranks of other nodes cannot answer for themselves"
NO_RUST_SERVER = "SGLang Inflight needs SGLANG_RUST_SERVER unset: it patches the Python"
NO_LOCAL_BROADCAST = (
    "SGLang Inflight needs a server without "
    "--enable-dp-attention-local-control-broadcast, which elastic expert parallelism and "
    "DWDP switch on: control messages then reach ranks in different steps"
)
NO_FIRST_UPDATE = (
    "SGLANG_INFLIGHT_REQUIRE_UPDATE needs --pp-size 1, no --disaggregation-mode and no "
    "--enable-pdmux: other loops cannot hold requests back"
)
# for whoever asks before a start
AT_START = (ONE_TOKENIZER, ONE_NODE, NO_RUST_SERVER, NO_LOCAL_BROADCAST, NO_FIRST_UPDATE)


class Unsupported(SystemExit):
    """A server argument that goes with none of this. A ``SystemExit`` stops the start."""


def refuse_at_start(engine_class: type, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Before any process is launched."""
    if server_args.tokenizer_worker_num > 1:
        raise Unsupported(ONE_TOKENIZER)
    if server_args.nnodes > 1:
        raise Unsupported(ONE_NODE)
    if envs.SGLANG_RUST_SERVER.get():
        raise Unsupported(NO_RUST_SERVER)
    requires_update = Settings.from_environment().require_update
    # as upstream does next; some of its features switch this one on
    server_args.resolve_once()
    resolved: ServerArgs = resolved_view(server_args)
    other_loop = resolved.disaggregation_mode != "null" or resolved.enable_pdmux
    if requires_update and (resolved.pp_size > 1 or other_loop):
        raise Unsupported(NO_FIRST_UPDATE)
    if resolved.enable_dp_attention_local_control_broadcast:
        raise Unsupported(NO_LOCAL_BROADCAST)


def why_no_pause() -> str | None:
    """Why this server's event loop has no pause states, or None where it has."""
    if get_parallel().pp_size > 1:
        return "a pause needs --pp-size 1: the pipeline loop has no pause states"
    if get_disagg().disaggregation_mode != "null":
        return "a pause needs a server without --disaggregation-mode"
    if get_disagg().enable_pdmux:
        return "a pause needs a server without --enable-pdmux"
    return None


def why_no_update(*, in_place: bool) -> str | None:
    """Why this server's weights cannot be updated, or None where they can.

    ``in_place`` is true where they are written between two steps, without a shadow.
    """
    mode = get_model().weight_cache_mode
    if mode != "off":
        return (
            f"weights are shared with other engines (--weight-cache-mode {mode}): an update "
            "needs --weight-cache-mode off"
        )
    if get_disagg().enable_pdmux:
        return "an update needs a server without --enable-pdmux: forwards run on several streams"
    if in_place:
        return None
    moe = get_exec().moe
    moves = {
        "--enable-eplb": moe.enable_eplb,
        "--elastic-ep-backend": moe.elastic_ep_backend is not None,
    }
    for flag, is_set in moves.items():
        if is_set:
            return (
                f"an update cannot be staged with {flag}: experts may move between staging and "
                "commit. SGLANG_INFLIGHT_STAGING=off writes them between two steps"
            )
    return None
