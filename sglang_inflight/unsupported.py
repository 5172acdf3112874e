"""Refuse unsupported server arguments at the start.

With ``SGLANG_INFLIGHT_UNSUPPORTED=off`` such a server starts as SGLang ships it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.environ import envs

from sglang_inflight import capabilities, inactive
from sglang_inflight.hooking import AROUND, BEFORE, ENGINE, hook
from sglang_inflight.livepatch import is_fork
from sglang_inflight.settings import Settings, extensions_on

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import ServerArgs

logger = logging.getLogger(__name__)

ONE_TOKENIZER = (
    "SGLang Inflight needs an Engine with tokenizer_worker_num=1: SGLang loads no plugins in "
    "processes that attach to it"
)
NO_RUST_SERVER = "SGLang Inflight needs SGLANG_RUST_SERVER unset: it patches the Python"
NO_LOCAL_BROADCAST = (
    "SGLang Inflight does not support --enable-dp-attention-local-control-broadcast together with "
    "elastic expert parallelism, DWDP, SGLANG_SCHEDULER_SKIP_ALL_GATHER or --pp-size above 1: "
    "control messages then reach ranks in different steps"
)
NO_FIRST_UPDATE = (
    "SGLANG_INFLIGHT_REQUIRE_UPDATE needs --pp-size 1, no --disaggregation-mode and no "
    "--enable-pdmux: other loops cannot hold requests back"
)
NO_ROLE_SWITCH = (
    "SGLang Inflight needs a server without --enable-pd-role-switch: its calls depend on the role, "
    "prefill or decode, at the start"
)
NO_SMG = (
    "SGLang Inflight does not support --smg-grpc-mode: requests then reach the ranks past its "
    "front end, which takes its calls and answers version contracts"
)
NO_AGES = (
    "SGLANG_INFLIGHT_KV_MAX_AGE needs --pp-size 1, no --disaggregation-mode, no --enable-pdmux, no "
    "--enable-hisparse, no --dllm-algorithm and no store behind the prefix cache: KV cannot be "
    "kept by its age with these"
)
# all refusals of a start, for the doctor
AT_START = (
    ONE_TOKENIZER,
    NO_RUST_SERVER,
    NO_LOCAL_BROADCAST,
    NO_FIRST_UPDATE,
    NO_ROLE_SWITCH,
    NO_SMG,
    NO_AGES,
)

# SGLang's arguments for which the core alone serves one value; an extension serves the others
ALONE: dict[str, object] = {
    "disaggregation_mode": "null",
    "enable_lora": False,
    "nnodes": 1,
    "tokenizer_worker_num": 1,
    "use_ray": False,
}

# whether ``launch`` has checked the launch in this context
_is_asked: ContextVar[bool] = ContextVar("_is_asked", default=False)


class Unsupported(SystemExit):
    """An unsupported server or node. A ``SystemExit``, because that stops the start."""


@hook(f"{ENGINE}._launch_subprocesses", AROUND)
def launch(
    launch_as_sglang_does: Callable[..., Any],
    engine_class: type,
    server_args: ServerArgs,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook around SGLang's launch: launch with us or without us, or raise ``Unsupported``.

    Raises before any process starts.
    """
    # only Engine passes a placement_group; the launch of an HTTP server has none
    is_engine = "placement_group" in kwargs
    why = why_not(server_args, is_engine=is_engine)
    with inactive.launching(_decide_and_tell(why, server_args)):
        was_asked = _is_asked.set(True)
        try:
            return launch_as_sglang_does(engine_class, server_args, *args, **kwargs)
        finally:
            _is_asked.reset(was_asked)


def _begin_smg(_: ModuleType) -> None:
    inactive.begin(_decide(NO_SMG))


def _begin_encoder(_: ModuleType) -> None:
    logger.warning("%s.", capabilities.NO_ENCODER)


# SGLang's servers without our front end, by the module that SGLang imports to launch one
OTHER_LAUNCHES: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.entrypoints.grpc_server": _begin_smg,
    "sglang.srt.disaggregation.encoder.http_server": _begin_encoder,
    "sglang.srt.disaggregation.encoder.grpc_server": _begin_encoder,
}


# SGLang calls this once, after loading plugins and before starting processes
@hook("sglang.srt.parser.template_detection.resolve_auto_parsers", BEFORE)
def ask_in_a_launch(server_args: ServerArgs) -> None:
    """Check a launch that began before our hooks were installed.

    ``launch_server``, called from Python, loads plugins within the function hooked by ``launch``.
    No process has been started by then.
    """
    if not _is_asked.get():
        inactive.begin(_decide_and_tell(why_not(server_args), server_args))


def refuse_what_was_not_asked(server_args: ServerArgs) -> None:
    """Check a scheduler's server, however it was launched, before the scheduler's controller.

    Raises ``Unsupported`` to end the server: its other processes may run with us already.
    """
    if (why := why_not(server_args)) is not None:
        raise Unsupported(f"{why}. Launch it by sglang serve, sglang.Engine or launch_server")


def _decide_and_tell(why: str | None, server_args: ServerArgs) -> str | None:
    """Decide, and tell tokenizer workers of it, or the log what such a server is not for."""
    if why is None:
        for note in capabilities.notes_on(server_args):
            logger.warning("%s.", note)
        return None
    _tell_tokenizer_workers(server_args, _decide(why))
    return why


def _decide(why: str) -> str:
    """Return ``why`` if the server runs without us, or raise ``Unsupported``."""
    off = Settings.from_environment().unsupported == "off"
    if (refusal := why_refused(why, off=off, in_fork=is_fork())) is not None:
        raise Unsupported(refusal)
    logger.warning("%s. This server runs as SGLang ships it, without SGLang Inflight.", why)
    return why


def why_not(server_args: ServerArgs, *, is_engine: bool = False) -> str | None:
    """Return why a server with these arguments cannot run with us, or None."""
    if is_engine and server_args.tokenizer_worker_num > 1:
        return ONE_TOKENIZER
    if envs.SGLANG_RUST_SERVER.get():
        return NO_RUST_SERVER
    # SGLang does so next; some of its features switch on the flags below
    server_args.resolve_once()
    resolved = cast("ServerArgs", resolved_view(server_args))
    if resolved.smg_grpc_mode and not resolved.encoder_only:
        return NO_SMG
    if (lacking := _why_not_alone(resolved)) is not None:
        return lacking
    if resolved.enable_pd_role_switch:
        return NO_ROLE_SWITCH
    other_loop = resolved.disaggregation_mode != "null" or resolved.enable_pdmux
    settings = Settings.from_environment()
    if settings.require_update and (resolved.pp_size > 1 or other_loop):
        return NO_FIRST_UPDATE
    is_bounded = settings.kv_max_age is not None and not resolved.encoder_only
    if is_bounded and capabilities.of(server_args).kv_max_age is not None:
        return NO_AGES
    if _ranks_receive_in_different_steps(resolved):
        return NO_LOCAL_BROADCAST
    return None


def _why_not_alone(resolved: ServerArgs) -> str | None:
    """Return which value needs an extension that is off or not installed, or None."""
    supported = {argument for extension in extensions_on() for argument in extension.serves}
    for argument, alone in ALONE.items():
        value = getattr(resolved, argument)
        if value not in (None, alone) and argument not in supported:
            return (
                f"SGLang Inflight needs {argument}={alone!r} here, not {value!r}: the extension "
                "that serves it is not installed, or SGLANG_INFLIGHT_EXTENSIONS leaves it out"
            )
    return None


def _ranks_receive_in_different_steps(resolved: ServerArgs) -> bool:
    """Return whether ``scheduler/collectives.py`` cannot work: not all ranks meet each step."""
    if not resolved.enable_dp_attention_local_control_broadcast:
        return False
    return (
        resolved.elastic_ep_backend is not None
        or resolved.dwdp_size > 1
        or resolved.pp_size > 1
        or envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get()
    )


def why_refused(why: str, *, off: bool, in_fork: bool) -> str | None:
    """Return the error of a server that must not start, or None if it starts without us.

    ``off`` is true with ``SGLANG_INFLIGHT_UNSUPPORTED=off``.
    """
    if not off:
        return f"{why}. SGLANG_INFLIGHT_UNSUPPORTED=off starts it without SGLang Inflight"
    if in_fork:
        return (
            f"{why}. SGLANG_INFLIGHT_UNSUPPORTED=off needs an SGLang without patches in its files, "
            "and this one is a fork"
        )
    return None


def _tell_tokenizer_workers(server_args: ServerArgs, why: str) -> None:
    """Make tokenizer workers answer ``why`` on our routes.

    Workers load no plugins, and import the HTTP app by the name in this variable. Workers start
    after the server's other processes, and again whenever one has ended.
    """
    if server_args.tokenizer_worker_num > 1:
        os.environ[inactive.OF_WORKERS] = why
        os.environ.setdefault(
            "SGLANG_HTTP_SERVER_APP_PATH", "sglang_inflight.frontend.http.worker_app:app"
        )
