"""Load SGLang Inflight in further tokenizer workers.

SGLang loads no plugins in these processes. A worker unpickles its server's arguments before it
uses them, and an ``OwnerEndpoint`` among them loads us when unpickled. So we are loaded under
uvicorn, under granian, and in a user's own app.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# attribute of SGLang's ``PortArgs`` holding the endpoint
ATTRIBUTE = "inflight"


@dataclass(frozen=True)
class OwnerEndpoint:
    """The owner's sockets. Only this server's user can enter ``folder``, so no key is needed."""

    folder: Path

    @property
    def calls(self) -> Path:
        """Socket for HTTP calls."""
        return self.folder / "calls"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def __reduce__(self) -> tuple[Callable[[Path], OwnerEndpoint], tuple[Path]]:
        return accept, (self.folder,)


def accept(folder: Path) -> OwnerEndpoint:
    """Load our plugin and return the endpoint. Ends the process if it cannot be patched."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return OwnerEndpoint(folder)
