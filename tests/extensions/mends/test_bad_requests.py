"""A grammar without an allowed token."""

from __future__ import annotations

import pytest

from harness.server import Server
from tests.support.load import requests_run_on
from tests.test_bad_requests import generate


@pytest.mark.guards_fix
def test_grammar_without_an_allowed_token_answers_500(server: Server) -> None:
    """Each token of the marker begins with a space or a t."""
    with requests_run_on(server):
        answer = server.post(*generate(drawn=True, sampling={"regex": "(a+)+"}))
        assert answer["status_code"] == 500, answer
        assert "rammar" in str(answer)
