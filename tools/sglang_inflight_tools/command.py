"""``sglang-inflight doctor``, whose arguments ``sglang_inflight/cli/local.py`` declares."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from sglang_inflight.cli.output import print_table, start_table
from sglang_inflight_tools.doctor import Report, report


def doctor(server_flags: Sequence[str], *, as_json: bool) -> int:
    """Print a report, and return the exit code. 1: a server would not start."""
    found = report(server_flags)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, default=str))
    else:
        _show(found)
    return 0 if found.healthy else 1


def _show(report: Report) -> None:
    facts = start_table("fact", "value")
    for name, value in report.versions.items():
        facts.add_row(name, value)
    facts.add_row("platform", report.platform or "none")
    for name, value in report.on_cpu.items():
        facts.add_row(name, value)
    facts.add_row("supported", f"sglang {' or '.join(report.supported)}")
    facts.add_row("patches", report.series or "none")
    for name, value in report.settings.items():
        facts.add_row(name, str(value))
    print_table(facts)

    if report.functions:
        patched = start_table("function", "patches", "state")
        for function in report.functions:
            state = "already applied (fork)" if function.in_fork else "applies"
            names = "\n".join(name.removesuffix(".patch") for name in function.patches)
            patched.add_row(function.qualname, names, state)
        print_table(patched)
    if report.hooks:
        hooked = start_table("hook", "kind", "state")
        for hook in report.hooks:
            target = ".".join(hook.target.split(".")[-2:])
            hooked.add_row(target, hook.kind, hook.reason or "is there")
        print_table(hooked)
    if report.flags:
        known = start_table("flag", "what is known of it beside SGLang Inflight")
        for flag, word in report.flags.items():
            known.add_row(flag, word)
        print_table(known)
    if report.capabilities is not None:
        cannot = start_table("a server with these flags", "can")
        for name, why in report.capabilities.items():
            cannot.add_row(name, "yes" if why is None else f"no: {why}")
        print_table(cannot)
    if report.kv_tokens:
        costs = start_table("form of staging", "keeps memory of about … tokens of KV")
        for form, tokens in report.kv_tokens.items():
            costs.add_row(form, str(tokens))
        print_table(costs)
    off = report.settings.get("unsupported") == "off"
    becomes = "started without SGLang Inflight" if off else "refused"
    refused = start_table(f"a server is {becomes} if it asks for")
    for sentence in report.refused:
        refused.add_row(sentence)
    print_table(refused)
    for sentence in report.inactive:
        typer.secho(f"{sentence}: the server would run as SGLang ships it", fg="yellow", bold=True)
    for note in report.notes:
        typer.secho(note, fg="yellow")
    for problem in report.problems:
        typer.secho(problem, fg="red", bold=True)
    verdict = "would start" if report.healthy else "would not start"
    typer.secho(f"A server {verdict} here.", fg="green" if report.healthy else "red", bold=True)
