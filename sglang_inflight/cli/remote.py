"""Commands for a running server: status, pause, resume, update, roll back.

Exit codes: 0 done; 1 refused; 2 bad usage; 3 the server's state does not allow it (409); 4 perhaps
done, or done in part: ask the status; 5 the server was not reached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import httpx
import typer

from sglang_inflight.cli.output import print_json, print_table, staging_bar, start_table
from sglang_inflight.client import Client, Receipt, StagedSoFar, Status
from sglang_inflight.vocabulary.answers import CONTROL_SYNC, RankStatus
from sglang_inflight.vocabulary.errors import Conflict, InflightError, Refused

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_inflight.vocabulary.answers import NewRequests, PauseMode
    from sglang_inflight.vocabulary.kept_kv import KVPolicy

LOCAL = "http://127.0.0.1:30000"

Url = Annotated[str, typer.Option(envvar="SGLANG_URL", help="URL of the server.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="SGLANG_API_KEY", help="The server's admin key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

# errors before anything was sent
_NOT_REACHED = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.UnsupportedProtocol,
    httpx.InvalidURL,
)


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[Client]:
    """Yield a client. Turn its errors into a message and an exit code."""
    with exit_codes(url), Client(url, api_key=api_key) as client:
        yield client


@contextmanager
def exit_codes(url: str) -> Iterator[None]:
    """Turn a client's errors into a message, for ``url``, and an exit code."""
    try:
        yield
    except InflightError as error:
        typer.echo(str(error), err=True)
        code = 3 if isinstance(error, Conflict) else 1 if isinstance(error, Refused) else 4
        raise typer.Exit(code) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(5 if isinstance(error, _NOT_REACHED) else 4) from error


@contextmanager
def until_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the block normally."""
    try:
        yield
    except KeyboardInterrupt:
        return


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
        rejects = ", new requests are rejected" if holder.new_requests == "reject" else ""
        facts.add_row("held by", f"{holder.pause_id} ({holder.mode}, {lease}{rejects})")
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


def pause(
    mode: Annotated[str, typer.Option(help="in_place, retract, abort or wait.")] = "in_place",
    lease_s: Annotated[
        float | None, typer.Option(help="End the pause after this many seconds.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Time limit in seconds of mode wait.")
    ] = None,
    new_requests: Annotated[
        str, typer.Option(help="queue requests that arrive in the pause, or reject them: 503.")
    ] = "queue",
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Pause generation. Prints the pause's id; pass it to `continue`."""
    with connect(url, api_key) as client:
        # the server refuses another mode, or another word for new requests
        answer = client.pause(
            cast("PauseMode", mode),
            lease_s=lease_s,
            timeout_s=timeout_s,
            new_requests=None if new_requests == "queue" else cast("NewRequests", new_requests),
        )
    print_json(answer) if as_json else typer.echo(answer.pause_id)


def resume(
    pause_id: Annotated[
        str | None, typer.Argument(help="A pause's id; all pauses if left out.")
    ] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Release a pause, or all."""
    with connect(url, api_key) as client:
        answer = client.resume(pause_id)
    print_json(answer) if as_json else typer.echo(answer.message)


def update_disk(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder on the server.")],
    weight_version: Annotated[str | None, typer.Option(help="Name of the new version.")] = None,
    expected_version: Annotated[
        str | None, typer.Option(help="Refuse unless this version is served.")
    ] = None,
    expected_digest: Annotated[
        str | None, typer.Option(help="Refuse tensors of another digest, all together.")
    ] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="fence (the default), by_salt, keep or recompute.")
    ] = None,
    kv_max_age: Annotated[
        int | None, typer.Option(help="Keep KV that is at most this many commits old.")
    ] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Stage a checkpoint while the server generates, and commit it."""
    with (
        connect(url, api_key) as client,
        staging_bar(path, hidden=as_json) as on_progress,
    ):
        receipt = client.update_from_disk(
            path,
            weight_version=weight_version,
            # the server refuses another policy
            kv_cache=cast("KVPolicy | None", kv_cache),
            kv_max_age=kv_max_age,
            flush_cache=False,
            expected_version=expected_version,
            expected_digest=expected_digest,
            on_progress=on_progress,
        )
    _show_receipt(receipt, as_json=as_json)


def rollback(
    weight_version: Annotated[
        str | None, typer.Option(help="New name of the previous version.")
    ] = None,
    expected_version: Annotated[
        str | None, typer.Option(help="Refuse unless this version is served.")
    ] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Return to the weights before the last commit."""
    with connect(url, api_key) as client:
        receipt = client.roll_back(weight_version=weight_version, expected_version=expected_version)
    _show_receipt(receipt, as_json=as_json)


def _show_receipt(receipt: Receipt | StagedSoFar, *, as_json: bool) -> None:
    if as_json:
        print_json(receipt)
        return
    if isinstance(receipt, StagedSoFar):
        typer.echo(receipt.message)
        return
    ranks, megabytes = len(receipt.ranks), receipt.bytes / 1e6
    typer.echo(
        f"{receipt.base_version} → {receipt.weight_version} on {ranks} ranks: "
        f"{megabytes:.1f} MB staged in {receipt.staged_s:.1f} s, "
        f"steps held up for {receipt.stall_ms:.2f} ms"
    )
