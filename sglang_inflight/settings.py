"""Every ``SGLANG_INFLIGHT_*`` setting, read once per process from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from sglang_inflight import inactive
from sglang_inflight.errors import BadSetting

PREFIX = "SGLANG_INFLIGHT_"

_T = TypeVar("_T")


def _setting(default: _T, parse: Callable[[str], _T], help: str) -> _T:
    value: Any = field(default=default, metadata={"parse": parse, "help": help})
    return value


def _boolean(text: str) -> bool:
    try:
        return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
    except KeyError:
        raise ValueError("expected 0, 1, true or false") from None


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("expected a number, 0 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("expected a number above 0, at most 1")
    return value


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text

    return parse


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number, 0 or more")
    return value


@dataclass(frozen=True)
class Settings:
    """Settings of one server. Each field is ``SGLANG_INFLIGHT_<NAME IN CAPITALS>``."""

    staging: str = _setting(
        "auto",
        _one_of("auto", "device", "host", "off"),
        "where new weights wait for their commit; off writes in place",
    )
    staging_kv_share: float = _setting(
        0.15,
        _share,
        "of what the KV cache would get on a device, how much staging=auto may set aside for "
        "a second copy of the weights",
    )
    update_timeout_s: float = _setting(
        600.0, _positive, "longest time one update call may take, in seconds"
    )
    group_timeout_s: float = _setting(
        120.0, _positive, "longest rendezvous of a weight-update group, in seconds"
    )
    check_finite: bool = _setting(True, _boolean, "refuse tensors that hold NaN or infinity")
    max_version_lag: int | None = _setting(
        None,
        _natural,
        "end a request at the commit that leaves its first token further behind, in commits",
    )
    pd_mismatch: str = _setting(
        "keep",
        _one_of("keep", "abort"),
        "what a decode server does with a request that comes from a prefill server with another "
        "version: keep says so in its spans; abort ends it with 503",
    )
    pace_bytes_per_s: int | None = _setting(
        None,
        _natural,
        "bytes of memory per second that staging touches while requests run; a whole update "
        "touches its bytes five times, and six times from disk; 0 does not pace; unset is 256 MiB "
        "on a CPU, else 100 GiB",
    )
    pace_interpreter: float = _setting(
        0.25,
        _share,
        "share of one core's time that staging spends in Python while requests run; 1 does not "
        "limit it, and neither does pace_bytes_per_s=0",
    )
    switch_interval_s: float = _setting(
        0.0002,
        _seconds,
        "how long a thread of a scheduler keeps the Python interpreter that another one waits "
        "for, in seconds; 0 leaves Python's 0.005",
    )
    stage_nice: int = _setting(
        0, _natural, "niceness of the staging thread on a CPU server, 0 to 19"
    )
    spans: str = _setting(
        "all",
        _one_of("all", "sglang"),
        "what answers say of their versions: all, or what SGLang says by itself, which is spans "
        "by name alone and in a stream's last chunk alone",
    )
    sse_comment_s: float = _setting(
        15.0,
        _seconds,
        "how often a silent event stream gets an empty line while paused, in seconds; 0 is never",
    )
    sse_comment: bool = _setting(
        False, _boolean, "say in that line, as a comment, which mode the pause has"
    )

    transparent: bool = _setting(
        False,
        _boolean,
        "between pause_generation and continue_generation nothing stops, and the weights that "
        "are sent meanwhile go live in flight",
    )
    transparent_grace_s: float = _setting(
        30.0,
        _positive,
        "how long such a pause may go without an update before it becomes a real one, in seconds",
    )
    require_update: bool = _setting(
        False,
        _boolean,
        "serve nothing before a whole update has come: the weights of the start are noise, as "
        "--load-format dummy makes them",
    )
    vllm_routes: bool = _setting(
        False, _boolean, "answer vLLM's routes for RL too, as vLLM does where that is safe"
    )
    model_names: str = _setting(
        "known",
        _one_of("known", "any"),
        "what a request's model may say: known is a name of the model that is served or of an "
        "adapter, and 404 for any other; any serves the model by every other name, as SGLang does",
    )
    unsupported: str = _setting(
        "refuse",
        _one_of("refuse", "off"),
        "what becomes of a server that asks for what goes with none of this: refuse stops its "
        "start; off starts it as SGLang ships it, without SGLang Inflight",
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises ``BadSetting`` for a value that cannot be read, and for an unknown name."""
        known = {PREFIX + f.name.upper(): f for f in fields(cls)}
        chosen = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
                continue
            if name not in known:
                raise BadSetting(f"{name} is not a setting; there are {', '.join(known)}")
            try:
                chosen[known[name].name] = known[name].metadata["parse"](text)
            except ValueError as error:
                raise BadSetting(f"{name}={text!r}: {error}") from error
        return cls(**chosen)


# Read where no server is started, by the demo and by porting; and what a server tells its own
# processes.
_NOT_SETTINGS = {PREFIX + "CACHE", inactive.VARIABLE, inactive.OF_WORKERS}
