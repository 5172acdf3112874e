"""The version of this tree, and which versions of a client and a server belong together.

Before 1.0 a minor version may change fields of calls (docs/promises.md).
"""

from __future__ import annotations

# pyproject.toml, client/pyproject.toml and tools/pyproject.toml have the same
VERSION = "0.2.0"


def why_not_together(client: str, server: str) -> str | None:
    """Return why a client and a server of these versions do not belong together, or None."""
    if _minor(client) == _minor(server):
        return None
    wanted = ".".join(_minor(server))
    return (
        f"this client is sglang-inflight-client {client}, and the server is sglang-inflight "
        f"{server}: install sglang-inflight-client=={wanted}.*"
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
