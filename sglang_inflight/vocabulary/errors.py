"""Errors, named by the caller's remedy.

All but ``BadSetting`` are answers to a caller, never faults of the server. Each class says whether
something has changed:

    ``Refused``          nothing. Mend the call, or the server's state, and call again.
    ``OutcomeUnknown``   perhaps: the call was sent, and a rank did not answer. Ask the status.
    ``HalfDone``         a part is done and stays so. The message says which part.

Callers' texts, names of tensors, and other errors are shortened for a message.
"""

from __future__ import annotations

import errno
import os

from sglang_inflight.vocabulary.labels import VersionLabel

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
# errors raised by C++ carry this text but no errno
_SAYS_SO = os.strerror(errno.EMFILE)
_HINT = (
    "Nothing has changed. Call again when the server has fewer connections and files open, or "
    "start it with a larger limit (ulimit -n)"
)
_MOST = 200


class BadSetting(SystemExit):
    """An unusable environment setting. Mend the setting and start again.

    A ``SystemExit``, because SGLang swallows every ``Exception`` of a plugin.
    """


class InflightError(Exception):
    """An error answered to a caller, with its HTTP status."""

    status = 500

    @property
    def status_code(self) -> int:
        """HTTP status, under the name read by SGLang's routes."""
        return self.status


class Refused(InflightError):
    """The call is refused, and nothing has changed. Mend the call and repeat it."""

    status = 400


class Conflict(Refused):
    """The call is sound, but the server's state is not as the caller expects."""

    status = 409


class NotFound(Refused):
    """The server has nothing of the name in the call."""

    status = 404


class UnknownLayout(NotFound):
    """The server keeps no layout of this digest. Repeat the call with the whole layout."""


class TooLarge(Refused):
    """The call's body is too large. The message names another way to send it."""

    status = 413


class NotOffered(Refused):
    """This server can never do it: no change to the call or to the server's state helps."""

    status = 501


class Gone(Refused):
    """The server or engine is shutting down: no rank answers. Ask another server."""

    status = 503


class RetryLater(Refused):
    """This server does not take the request now. Send it elsewhere, or again later."""

    status = 503
    # seconds, for the answer's header ``Retry-After``
    retry_after_s = 1

    def __init__(self, message: str, served: VersionLabel | None = None) -> None:
        """``served`` is what the server serves, for the answer's body and headers."""
        super().__init__(message)
        self.served = served


class NotServed(RetryLater):
    """The server does not serve the version asked for."""


class Rejected(RetryLater):
    """A held pause rejects new requests."""


class Behind(RetryLater):
    """The server's fleet serves another version."""


class Exhausted(Refused):
    """A process of the server has reached its limit of file descriptors. Call again later."""

    status = 503

    def __init__(self, message: str) -> None:
        if _HINT not in message:
            message = f"{message}. {_HINT}"
        super().__init__(message)

    @staticmethod
    def is_cause_of(error: BaseException) -> bool:
        """Return whether ``error`` or one of its causes is a lack of file descriptors."""
        cause: BaseException | None = error
        while cause is not None:
            if getattr(cause, "errno", None) in _NONE_LEFT or _SAYS_SO in str(cause):
                return True
            cause = cause.__cause__
        return False


class RankFailed(Refused):
    """A rank failed before the commit. Every rank goes on serving the old weights."""


class RankSilent(Refused):
    """A rank did not answer in time. The call was cancelled, and nothing has changed."""

    status = 504


class Outgrown(Refused):
    """The update changes more elements than there is memory to stage."""


class Unproven(Refused):
    """The model cannot be staged beside the served one, for a reason that shows only there.

    SGLang finishes it after loading in a way that cannot be repeated, or keeps a weight where a
    commit cannot write it beside forwards.
    """


class Altered(Refused):
    """Tensors came with other digests than expected. Send them again."""


class Dropped(Refused):
    """The update was dropped before its commit."""


class OutcomeUnknown(InflightError):
    """The call was sent and cannot be cancelled, and a rank did not report its outcome."""

    status = 504


class HalfDone(InflightError):
    """The call failed midway. The finished part stays done."""


class HandlerFailed(HalfDone):
    """One of SGLang's own handlers raised on a rank. The rank goes on serving."""


def _all(error: type[InflightError]) -> dict[str, type[InflightError]]:
    found = {error.__name__: error}
    for child in error.__subclasses__():
        found |= _all(child)
    return found


# class name -> class: errors cross processes by name
ERRORS = _all(InflightError)


def shorten(text: str) -> str:
    """Return the first line of ``text``, without its middle if it is long."""
    text = text.partition("\n")[0]
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    return f"{text[:half]}…{text[-half:]}"


def list_names(names: list[str], most: int = 8) -> str:
    """Return the first ``most`` of ``names``, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def describe(error: BaseException) -> str:
    """Return ``error`` in a few words, without the path in an ``OSError``."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return shorten(str(error)) or type(error).__name__
