"""Settings: ``SGLANG_INFLIGHT_*``, read from a process' environment.

An extension has a dataclass of its own, whose fields are made by ``setting``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from sglang_inflight import inactive
from sglang_inflight.extension import Extension, all_extensions
from sglang_inflight.vocabulary.deprecations import present_names
from sglang_inflight.vocabulary.errors import BadSetting

logger = logging.getLogger(__name__)

PREFIX = "SGLANG_INFLIGHT_"
_EXTENSIONS = f"{PREFIX}EXTENSIONS"

_T = TypeVar("_T")


def setting(default: _T, parse: Callable[[str], _T], help: str, *, is_shared: bool = False) -> _T:
    """Return a field. A setting that ``is_shared`` is the same on all nodes of a server.

    Ranks of a replica step together, so what a step does may depend only on such settings.
    """
    metadata = {"parse": parse, "help": help, "is_shared": is_shared}
    value: Any = field(default=default, metadata=metadata)
    return value


def boolean(text: str) -> bool:
    try:
        return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
    except KeyError:
        raise ValueError("expected 0, 1, true or false") from None


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number above 0")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("expected a number, 0 or more")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("expected a number above 0, at most 1")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text

    return parse


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number, 0 or more")
    return value


def counted(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("expected a whole number, 1 or more")
    return value


def names_of_extensions(text: str) -> tuple[str, ...]:
    if text in ("", "none"):
        return ()
    names = {name.strip() for name in text.split(",")}
    there = {each.name: each for each in all_extensions()}
    if unknown := sorted(names - there.keys()):
        raise ValueError(f"no extension {', '.join(unknown)}; there are {', '.join(there)}")
    for name in sorted(names):
        if lacking := sorted({*there[name].requires} - names):
            raise ValueError(f"{name} requires {', '.join(lacking)}")
    return tuple(sorted(names))


@dataclass(frozen=True)
class Settings:
    """The core's settings of one server. Each field is ``SGLANG_INFLIGHT_<NAME IN CAPITALS>``."""

    staging: str = setting(
        "auto",
        one_of("auto", "changes", "device", "host", "off"),
        "form of staged weights until their commit: changes keeps the elements that differ, device "
        "and host keep a second copy, off writes in place",
        is_shared=True,
    )
    changes_bytes: int | None = setting(
        None,
        natural,
        "device memory that changed elements may take, in bytes; more of them wait in the host's "
        "memory; unset is a tenth of the rank's weights",
    )
    outgrown: str = setting(
        "in_place",
        one_of("in_place", "refuse"),
        "an update from disk whose changes outgrow the memory of the device and of the host: "
        "in_place writes it over the served weights while requests wait; refuse changes nothing",
    )
    kv_max_age: int | None = setting(
        None,
        natural,
        "the oldest KV of older weights that a commit keeps, in commits, where the call says "
        "neither kv_cache nor kv_max_age; unset: SGLang's flush_cache decides",
        is_shared=True,
    )
    proof: str = setting(
        "first_update",
        one_of("first_update", "start"),
        "when the served checkpoint shows where updates' tensors go, and that a model which SGLang "
        "finishes after loading can be finished beside itself: at the first update, or before the "
        "server is ready",
    )
    window_bytes: int = setting(
        64 << 20,
        natural,
        "host memory of weights that a loader writes other than by copies, in bytes, with "
        "staging=changes",
    )
    sessions: str = setting(
        "partial",
        one_of("partial", "whole", "as_before"),
        "tensors that a session must bring if its begin_weight_update leaves partial out: partial "
        "needs none; whole needs the whole checkpoint; as_before needs those of the last session "
        "that left partial out, too",
    )
    update_timeout_s: float = setting(
        600.0, positive, "longest time one update call may take, in seconds"
    )
    group_timeout_s: float = setting(
        120.0, positive, "longest rendezvous of a weight-update group, in seconds"
    )
    check_finite: bool = setting(True, boolean, "refuse tensors that hold NaN or infinity")
    pause_lease_s: float | None = setting(
        None,
        positive,
        "lease of a pause whose caller names none, in seconds: a dead trainer's pause then ends",
    )
    pace_bytes_per_s: int | None = setting(
        None,
        natural,
        "bytes of memory per second that staging touches while requests run; a whole update "
        "touches its bytes five times, and six times from disk; 0 does not pace; unset is 640 MiB "
        "on a CPU, else 100 GiB",
    )
    pace_interpreter: float = setting(
        0.25,
        share,
        "share of one core's time that staging spends in Python while requests run; 1 does not "
        "limit it, and neither does pace_bytes_per_s=0",
    )
    switch_interval_s: float = setting(
        0.0002,
        seconds,
        "longest time a scheduler's thread keeps Python's GIL from a waiting thread, in seconds; "
        "0 leaves Python's 0.005",
    )
    stage_nice: int = setting(0, natural, "niceness of the staging thread on a CPU server, 0 to 19")
    spans: str = setting(
        "all",
        one_of("all", "sglang"),
        "version spans in answers: all, or sglang, which has SGLang's own spans: by name alone, "
        "and only in a stream's last chunk",
    )
    require_update: bool = setting(
        False,
        boolean,
        "serve nothing before the first whole update, for a start with random weights "
        "(--load-format dummy)",
        is_shared=True,
    )
    model_names: str = setting(
        "known",
        one_of("known", "any"),
        "accepted values of a request's model: known takes a name of the served model or of an "
        "adapter, and answers 404 to any other; any serves the model under every other name, as "
        "SGLang does",
    )
    extensions: tuple[str, ...] | None = setting(
        None,
        names_of_extensions,
        "names of the extensions that may be on, with commas; none is the core alone; unset is all",
        is_shared=True,
    )
    unsupported: str = setting(
        "refuse",
        one_of("refuse", "off"),
        "at server arguments unsupported by SGLang Inflight: refuse stops the start; off starts "
        "the server as SGLang ships it, without SGLang Inflight",
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the core's settings, as ``read`` does."""
        return read(cls, environ)


# CACHE is read by the demo and by porting, without a server. A server sets the other two for its
# own processes.
_NOT_SETTINGS = {PREFIX + "CACHE", inactive.VARIABLE, inactive.OF_WORKERS}


def kinds() -> list[type[Any]]:
    """Return the dataclasses of all settings: the core's first, then each extension's."""
    return [Settings, *(each.settings for each in all_extensions() if each.settings is not None)]


def extensions_on() -> tuple[Extension, ...]:
    """Return the extensions that are on: by ``Settings.extensions`` and by their own ``is_on``."""
    names = Settings.from_environment().extensions
    return tuple(each for each in all_extensions() if _is_in(each, names) and each.is_on())


def read(kind: type[_T], environ: Mapping[str, str] = os.environ) -> _T:
    """Read the settings of one dataclass, the core's or an extension's.

    Raises ``BadSetting`` for an unreadable value, and for a name that is no setting of any, or one
    of an extension that ``Settings.extensions`` leaves out.
    """
    known = {PREFIX + f.name.upper(): (each, f) for each in kinds() for f in fields(each)}
    values: dict[str, Any] = {}
    try:
        environ = present_names(environ, "setting", logger.warning)
    except ValueError as error:
        raise BadSetting(str(error)) from error
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        if name not in known:
            raise BadSetting(f"{name} is not a setting; there are {', '.join(known)}")
        try:
            values[name] = known[name][1].metadata["parse"](text)
        except ValueError as error:
            raise BadSetting(f"{name}={text!r}: {error}") from error
    left_out = {
        each.settings: each.name
        for each in all_extensions()
        if not _is_in(each, values.get(_EXTENSIONS))
    }
    for name in values:
        if (owner := known[name][0]) in left_out:
            raise BadSetting(
                f"{name} is a setting of {left_out[owner]}, which {_EXTENSIONS} leaves out"
            )
    return kind(
        **{known[name][1].name: value for name, value in values.items() if known[name][0] is kind}
    )


def _is_in(extension: Extension, names: tuple[str, ...] | None) -> bool:
    return names is None or extension.name in names
