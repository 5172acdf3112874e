"""Say what is known of each flag of ``sglang serve`` beside SGLang Inflight."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_inflight_tools.tried_flags import DECIDING, TRIED

TESTED = "tests start servers with it"
DECIDES = "what a server can do depends on it"
NO_EFFECT = "it reaches nothing that we change"
UNTRIED = "nothing of ours was tried with it"

# these name the form and the place of logs and traces
WITHOUT_EFFECT = frozenset(
    {
        "crash_dump_folder",
        "enable_request_time_stats_logging",
        "enable_trace",
        "log_level_http",
        "log_requests_format",
        "log_requests_target",
        "otlp_service_name",
        "otlp_traces_endpoint",
        "show_time_cost",
        "trace_modules",
        "uvicorn_access_log_exclude_prefixes",
    }
)


def arguments() -> dict[str, str]:
    """Return the name of SGLang's argument for each spelling of its flag."""
    # the import of SGLang takes seconds
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {flag: action.dest for action in parser._actions for flag in action.option_strings}


def look(server_flags: Sequence[str]) -> dict[str, str]:
    """Return a word on each of the given flags that SGLang has, in their order."""
    known = arguments()
    found: dict[str, str] = {}
    for text in server_flags:
        flag = text.partition("=")[0]
        # argparse takes the beginning of a flag for the flag
        meant = {known[flag]} if flag in known else _begun(flag, known)
        if len(meant) == 1:
            found[flag] = _word(*meant)
    return found


def _begun(flag: str, known: dict[str, str]) -> set[str]:
    if not flag.startswith("--") or flag == "--":
        return set()
    return {argument for each, argument in known.items() if each.startswith(flag)}


def _word(argument: str) -> str:
    if argument in WITHOUT_EFFECT:
        return NO_EFFECT
    words = [TESTED] * (argument in TRIED) + [DECIDES] * (argument in DECIDING)
    return ", and ".join(words) or UNTRIED
