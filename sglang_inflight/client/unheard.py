"""What went wrong on the way: the call may have been done all the same."""

from __future__ import annotations

from sglang_inflight.errors import OutcomeUnknown


class NoAnswer(OutcomeUnknown):
    """The server did not answer in the time that the call may take."""


class WrongAnswer(OutcomeUnknown):
    """What came back is no answer of such a server: it, or something before it, is broken."""
