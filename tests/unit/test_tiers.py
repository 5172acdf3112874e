"""Which tiers of a prefix cache can be kept from requests that come after a commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.errors import Refused
from sglang_inflight.frontend import tiers
from sglang_inflight.frontend.updates.kv_policy import require_supported

ONE: dict[str, Any] = {
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
}
TWO = {**ONE, "enable_hierarchical_cache": True}


def start(monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], pp_size: int = 1) -> None:
    """There is no server, whose settings these are."""
    monkeypatch.setattr(tiers, "get_memory", lambda: SimpleNamespace(**memory))
    monkeypatch.setattr(tiers, "get_parallel", lambda: SimpleNamespace(pp_size=pp_size))


@pytest.mark.parametrize("memory", [ONE, TWO], ids=["device", "host"])
def test_tiers_in_reach(monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]) -> None:
    start(monkeypatch, memory)
    assert tiers.why_out_of_reach() is None
    require_supported("fence", retracts=False)


@pytest.mark.parametrize(
    ("memory", "pp_size", "words"),
    [
        ({**TWO, "hicache_storage_backend": "mooncake"}, 1, "--hicache-storage-backend mooncake"),
        ({**ONE, "enable_lmcache": True}, 1, "LMCache"),
        ({**ONE, "enable_flexkv": True}, 1, "FlexKV"),
        (TWO, 2, "--pp-size above 1"),
    ],
)
@pytest.mark.parametrize("kv_cache", ["fence", "recompute"])
def test_tiers_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], pp_size: int, words: str, kv_cache: Any
) -> None:
    start(monkeypatch, memory, pp_size)
    with pytest.raises(Refused, match=words):
        require_supported(kv_cache, retracts=False)
    require_supported("keep", retracts=False)
