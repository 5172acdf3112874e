"""Missing fields of SGLang's re-prefill request to a prefill server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_inflight import unsupported


@pytest.mark.parametrize(
    ("enable_lora", "is_multimodal", "api_key", "why"),
    [
        (False, False, None, None),
        (True, False, None, "--enable-lora"),
        (False, True, None, "images"),
        (False, False, "secret", "--api-key"),
    ],
)
def test_reprefill_is_refused_with_reason(
    monkeypatch: pytest.MonkeyPatch,
    enable_lora: bool,
    is_multimodal: bool,
    api_key: str | None,
    why: str | None,
) -> None:
    lora, serving = SimpleNamespace(enable_lora=enable_lora), SimpleNamespace(api_key=api_key)
    monkeypatch.setattr(unsupported, "get_lora", lambda: lora)
    monkeypatch.setattr(unsupported, "get_serving", lambda: serving)
    reason = unsupported.why_not_sent_for_again(is_multimodal=is_multimodal)
    assert reason is None if why is None else why in (reason or "")
