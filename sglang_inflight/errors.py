"""Errors, named for what a caller can do about them.

``Refused`` and its children are answers to a caller, never faults of the server: the
routes turn each into its HTTP status, and whatever raises one has changed nothing.
"""

from __future__ import annotations


class BadSetting(SystemExit):
    """An environment setting cannot be used: mend it and start again.

    A ``SystemExit``, because SGLang swallows every ``Exception`` of a plugin.
    """


class Refused(Exception):
    """The call cannot be done as it stands. Mend it and call again."""

    status = 400

    @property
    def status_code(self) -> int:
        """The name under which upstream's routes look for it."""
        return self.status


class Conflict(Refused):
    """The call is sound, but the server's state is another one than the caller thinks."""

    status = 409


class NotOffered(Refused):
    """No change to the call and no state of this server makes it possible: do without it."""

    status = 501


class RankFailed(Refused):
    """A rank could not do its part. The old weights go on serving everywhere."""


class RankSilent(Refused):
    """A rank did not answer in time. The old weights go on serving everywhere."""

    status = 504


class HandlerFailed(Refused):
    """A handler of SGLang's own raised on a rank, which goes on. What it did stays done."""

    status = 500


class Dropped(Refused):
    """The update was dropped before its commit."""
