"""How a process that SGLang starts as a further tokenizer worker becomes one of ours.

SGLang loads no plugins there. Such a process unpickles its server's arguments, before it makes
anything out of them, and finds an owner_endpoint among them: to unpickle that is to load us. So it
holds for whoever starts workers, uvicorn or granian, and for an app of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# the attribute of SGLang's ``PortArgs`` that has it
ATTRIBUTE = "inflight"


@dataclass(frozen=True)
class OwnerEndpoint:
    """Where the owner is. ``folder`` can be entered by the user of this server alone, so who
    finds the sockets in it may use them.
    """

    folder: Path

    @property
    def calls(self) -> Path:
        """A socket that takes HTTP."""
        return self.folder / "calls"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def __reduce__(self) -> tuple[Callable[[Path], OwnerEndpoint], tuple[Path]]:
        return accept, (self.folder,)


def accept(folder: Path) -> OwnerEndpoint:
    """Ends the process where it cannot be patched, as every process of a server does then."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return OwnerEndpoint(folder)
