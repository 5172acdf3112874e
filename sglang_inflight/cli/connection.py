"""Connect commands to a server.

Exit codes: 0 done; 1 refused; 2 bad usage; 3 the server's state does not allow it (409); 4 perhaps
done, or done in part: ask the status; 5 the server was not reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import httpx
import typer

from sglang_inflight.client import Client
from sglang_inflight.vocabulary.errors import Conflict, InflightError, Refused

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
    try:
        with Client(url, api_key=api_key) as client:
            yield client
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
