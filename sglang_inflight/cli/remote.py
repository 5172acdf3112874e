"""Commands that drive a running server.

Exit codes: 0 done, 1 refused, 2 bad usage, 3 the server's state is another one (409), 4 a
rank did not answer (504), 5 the server was not reached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer

from sglang_inflight.cli.tables import print_table, start_table
from sglang_inflight.client import Client
from sglang_inflight.errors import Conflict, RankSilent, Refused

LOCAL = "http://127.0.0.1:30000"

Url = Annotated[str, typer.Option(envvar="SGLANG_URL", help="Where the server listens.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="SGLANG_API_KEY", help="The server's admin key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def status(url: Url = LOCAL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Say what a server serves, whether it is paused and by whom, and what is staged."""
    with _client(url, api_key) as client:
        answer = client.status()
    if as_json:
        _print_json(answer)
        return
    facts = start_table("fact", "value")
    for name in ("state", "mode", "weight_version", "epoch", "previous_version", "digest"):
        facts.add_row(name, str(answer[name]))
    for holder in answer["holders"]:
        left = holder["lease_left_s"]
        lease = "for ever" if left is None else f"for {left:.0f} s more"
        facts.add_row("held by", f"{holder['pause_id']} ({holder['mode']}, {lease})")
    for rank in answer["ranks"]:
        staging = rank["staging"]
        facts.add_row(
            f"rank dp{rank['dp_rank']} pp{rank['pp_rank']} tp{rank['tp_rank']}",
            f"{rank['running']} running, {rank['waiting']} waiting; staging {staging['state']}, "
            f"{staging['tensors']} tensors, {staging['bytes'] / 1e6:.1f} MB",
        )
    print_table(facts)


def pause(
    mode: Annotated[str, typer.Option(help="in_place, retract, abort or wait.")] = "in_place",
    lease_s: Annotated[float | None, typer.Option(help="End by itself after this long.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Longest time of the mode wait.")] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Pause generation. Prints the pause's id, by which it is let go again."""
    with _client(url, api_key) as client:
        answer = client.pause(mode, lease_s=lease_s, timeout_s=timeout_s)
    _print_json(answer) if as_json else typer.echo(answer["pause_id"])


def resume(
    pause_id: Annotated[str | None, typer.Argument(help="One pause; all if left out.")] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let go of a pause."""
    with _client(url, api_key) as client:
        answer = client.resume(pause_id)
    _print_json(answer) if as_json else typer.echo(answer["message"])


def update_disk(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder, as the server sees it.")],
    weight_version: Annotated[str | None, typer.Option(help="The name of these weights.")] = None,
    expected_version: Annotated[str | None, typer.Option(help="What must be serving now.")] = None,
    kv_cache: Annotated[str, typer.Option(help="fence, keep or recompute.")] = "fence",
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Stage a checkpoint while the server generates, and commit it."""
    with _client(url, api_key) as client:
        receipt = client.update_from_disk(
            path,
            weight_version=weight_version,
            kv_cache=kv_cache,
            expected_version=expected_version,
        )
    _show_receipt(receipt, as_json=as_json)


def rollback(
    weight_version: Annotated[str | None, typer.Option(help="A new name for the old.")] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Return to the weights before the last commit."""
    with _client(url, api_key) as client:
        receipt = client.roll_back(weight_version=weight_version)
    _show_receipt(receipt, as_json=as_json)


@contextmanager
def _client(url: str, api_key: str | None) -> Iterator[Client]:
    """A client, whose errors become a sentence and an exit code."""
    try:
        with Client(url, api_key=api_key) as client:
            yield client
    except Refused as error:
        typer.echo(str(error), err=True)
        code = 3 if isinstance(error, Conflict) else 4 if isinstance(error, RankSilent) else 1
        raise typer.Exit(code) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(5) from error


def _show_receipt(receipt: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(receipt)
        return
    ranks, megabytes = len(receipt["ranks"]), receipt["bytes"] / 1e6
    typer.echo(
        f"{receipt['base_version']} → {receipt['weight_version']} on {ranks} ranks: "
        f"{megabytes:.1f} MB staged in {receipt['staged_s']:.1f} s, "
        f"the loop held for {receipt['stall_ms']:.2f} ms"
    )


def _print_json(answer: dict[str, Any]) -> None:
    typer.echo(json.dumps(answer, indent=2))
