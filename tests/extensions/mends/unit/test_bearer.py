"""API keys of HTTP requests."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.utils import auth

from sglang_inflight.extensions.mends.keys import decide_request_auth


@pytest.mark.parametrize(
    ("key", "sent", "allowed"),
    [
        ("key", b"key", True),
        ("key", b"k\xc3\xaby", False),
        ("schlüssel", "schlüssel".encode(), True),
        ("schlüssel", "schlüssel".encode("latin-1"), False),
        ("schlüssel", b"schl%C3%BCssel", False),
        ("per%20cent", b"per%20cent", True),
        ("per cent", b"per%20cent", False),
        ("\udcff", b"\xff", True),
    ],
)
@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_api_key_is_compared_as_bytes(name: str, key: str, sent: bytes, allowed: bool) -> None:
    keys: dict[str, Any] = {"api_key": None, "admin_api_key": None, name: key}
    decision = decide_request_auth(
        auth.decide_request_auth,
        method="POST",
        path="/pause_generation",
        authorization_header="Bearer " + sent.decode("latin-1"),
        auth_level=auth.AuthLevel.ADMIN_OPTIONAL,
        **keys,
    )
    assert decision.allowed is allowed


def test_request_without_api_key_is_refused() -> None:
    decision = decide_request_auth(
        auth.decide_request_auth,
        method="GET",
        path="/server_info",
        authorization_header=None,
        api_key="key",
        admin_api_key=None,
        auth_level=auth.AuthLevel.NORMAL,
    )
    assert (decision.allowed, decision.error_status_code) == (False, 401)
