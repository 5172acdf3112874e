"""``sglang-inflight front``: serve a fleet at one address."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_inflight.cli.remote import ApiKey


def front(
    url: Annotated[list[str], typer.Option(help="A server. Repeat it for each.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 30000,
    api_key: ApiKey = None,
) -> None:
    """Serve a fleet at one address. Rollouts go on when their server dies or drains."""
    import uvicorn

    from sglang_inflight.extensions.front.app import make_app

    uvicorn.run(make_app(url, api_key), host=host, port=port, log_level="warning")
