"""Commands for a running server: pause, resume, update, roll back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from sglang_inflight.cli.connection import LOCAL, ApiKey, AsJson, Url, connect
from sglang_inflight.cli.output import print_json, staging_bar
from sglang_inflight.client import Receipt, StagedSoFar

if TYPE_CHECKING:
    from sglang_inflight.vocabulary.answers import PauseMode
    from sglang_inflight.vocabulary.bodies import KVPolicy


def pause(
    mode: Annotated[str, typer.Option(help="in_place, retract, abort or wait.")] = "in_place",
    lease_s: Annotated[
        float | None, typer.Option(help="End the pause after this many seconds.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Time limit in seconds of mode wait.")
    ] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Pause generation. Prints the pause's id; pass it to `continue`."""
    with connect(url, api_key) as client:
        # the server refuses another mode
        answer = client.pause(cast("PauseMode", mode), lease_s=lease_s, timeout_s=timeout_s)
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
    kv_cache: Annotated[str, typer.Option(help="fence, keep or recompute.")] = "fence",
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
            kv_cache=cast("KVPolicy", kv_cache),
            expected_version=expected_version,
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
