"""``sglang-inflight status``: print a server's status, once or live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_inflight.cli.connection import (
    LOCAL,
    ApiKey,
    AsJson,
    Url,
    connect,
    until_ctrl_c,
)
from sglang_inflight.cli.output import print_json, print_table, start_table
from sglang_inflight.client import Client, Status
from sglang_inflight.vocabulary.answers import CONTROL_SYNC, RankStatus

if TYPE_CHECKING:
    from rich.table import Table


def status(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update it live until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two samples.")] = 0.5,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show a server's version, pauses and staging.

    With --watch and --json, print one line per sample.
    """
    with connect(url, api_key) as client:
        if watch:
            with until_ctrl_c():
                _watch(client, every, as_json=as_json)
        elif as_json:
            print_json(client.status())
        else:
            print_table(_draw(client.status()))


def _watch(client: Client, every: float, *, as_json: bool) -> None:
    if as_json:
        while True:
            print_json(client.status(), indent=None)
            time.sleep(every)

    from rich.live import Live

    with Live(_draw(client.status()), auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_draw(client.status()), refresh=True)


def _draw(answer: Status) -> Table:
    facts = start_table("fact", "value")
    for name in ("state", "mode", "weight_version", "epoch", "previous_version", "digest"):
        facts.add_row(name, str(answer[name]))
    where = {kind: answer.memory[kind] for kind in ("weights", "kv_cache", "cuda_graph")}
    if set(where.values()) != {"present"}:
        facts.add_row("memory", ", ".join(f"{kind} {is_}" for kind, is_ in where.items()))
    for holder in answer.holders:
        left = holder.lease_left_s
        lease = "for ever" if left is None else f"for {left:.0f} s more"
        facts.add_row("held by", f"{holder.pause_id} ({holder.mode}, {lease})")
    for rank in answer.ranks:
        staging = rank.staging
        facts.add_row(
            f"rank dp{rank.dp_rank} pp{rank.pp_rank} tp{rank.tp_rank}",
            f"{rank.running} running, {rank.waiting} waiting; staging {staging.state}, "
            f"{staging.tensors} tensors, {staging.bytes / 1e6:.1f} MB",
        )
    # each fact once, even if many ranks report it
    for name, what in dict.fromkeys(fact for rank in answer.ranks for fact in _of_note(rank)):
        facts.add_row(name, what)
    return facts


def _of_note(rank: RankStatus) -> Iterator[tuple[str, str]]:
    """Yield the rank's staging mode, and everything wrong with the rank."""
    staging = rank.staging
    yield "staging mode", staging.mode
    reasons = {
        "no updates": staging.refusal,
        "dirty weights": staging.dirty,
        "hollow weights": rank.memory.hollow,
    }
    for name, why in reasons.items():
        if why is not None:
            yield name, why
    for group, how in staging.groups.items():
        if how != CONTROL_SYNC:
            yield f"group {group}", how
