"""Errors, named for what a caller can do about them.

All but ``BadSetting`` are answers to a caller, never faults of the server, and each says
truly whether something has changed:

    ``Refused``          nothing has. Mend the call, or the server's state, and call again.
    ``OutcomeUnknown``   perhaps: it was under way when it was last heard of. Ask the status.
    ``HalfDone``         a part is done and stays so. The message says which.
"""

from __future__ import annotations

import errno
import os

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
# also in what C++ raises, which has no number
_SAYS_SO = os.strerror(errno.EMFILE)
_HINT = (
    "Nothing has changed. Call again when the server has fewer connections and files open, or "
    "start it with a larger limit (ulimit -n)"
)


class BadSetting(SystemExit):
    """An environment setting cannot be used: mend it and start again.

    A ``SystemExit``, because SGLang swallows every ``Exception`` of a plugin.
    """


class InflightError(Exception):
    """An answer to a caller, with the HTTP status that it has."""

    status = 500

    @property
    def status_code(self) -> int:
        """The name under which upstream's routes look for it."""
        return self.status


class Refused(InflightError):
    """The call cannot be done as it stands, and nothing has changed. Mend it and call again."""

    status = 400


class Conflict(Refused):
    """The call is sound, but the server's state is another one than the caller thinks."""

    status = 409


class NotFound(Refused):
    """What the call names is not here."""

    status = 404


class TooLarge(Refused):
    """There is too much in the call. The message names a way that takes it."""

    status = 413


class NotOffered(Refused):
    """No change to the call and no state of this server makes it possible: do without it."""

    status = 501


class Gone(Refused):
    """The server ends, or the engine was shut down: no rank is there to answer. Ask another."""

    status = 503


class Exhausted(Refused):
    """A process of the server has reached its limit of file descriptors. Call again later."""

    status = 503

    def __init__(self, message: str) -> None:
        if _HINT not in message:
            message = f"{message}. {_HINT}"
        super().__init__(message)

    @staticmethod
    def is_cause_of(error: BaseException) -> bool:
        """Whether ``error``, or what it was raised from, says that no descriptor is left."""
        cause: BaseException | None = error
        while cause is not None:
            if getattr(cause, "errno", None) in _NONE_LEFT or _SAYS_SO in str(cause):
                return True
            cause = cause.__cause__
        return False


class RankFailed(Refused):
    """A rank could not do its part. The old weights go on serving everywhere."""


class RankSilent(Refused):
    """A rank did not answer in time, so the call was given up and nothing has changed."""

    status = 504


class Dropped(Refused):
    """The update was dropped before its commit."""


class OutcomeUnknown(InflightError):
    """It was sent where it cannot be called back, and not every rank said how it ended."""

    status = 504


class HalfDone(InflightError):
    """It failed in the middle, and what was done before stays done."""


class HandlerFailed(HalfDone):
    """A handler of SGLang's own raised on a rank, which goes on."""


def _all(error: type[InflightError]) -> dict[str, type[InflightError]]:
    found = {error.__name__: error}
    for child in error.__subclasses__():
        found |= _all(child)
    return found


# by the names under which they cross processes
ERRORS = _all(InflightError)
