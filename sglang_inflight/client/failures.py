"""Errors of lost or wrong answers: the call may have been done all the same."""

from __future__ import annotations

from sglang_inflight.errors import OutcomeUnknown


class NoAnswer(OutcomeUnknown):
    """The server did not answer within the call's time limit."""


class WrongAnswer(OutcomeUnknown):
    """The response is no answer of ours: the server or a proxy is broken."""
