"""``PatchRefused``, the only error of this package: it stops the server's start."""

from __future__ import annotations


class PatchRefused(SystemExit):
    """The series cannot be applied as a whole: install the right SGLang, or drop a plugin.

    A ``SystemExit``: SGLang swallows every ``Exception`` of a plugin, and would start half
    patched.
    """

    def __init__(
        self,
        reason: str,
        *,
        found: str,
        patch: str | None = None,
        function: str | None = None,
    ) -> None:
        self.reason = reason
        self.found = found
        self.patch = patch
        self.function = function
        where = ", ".join(part for part in (patch, function) if part)
        super().__init__(
            f"sglang-inflight refuses to start on {found}: {where + ': ' if where else ''}{reason}"
        )
