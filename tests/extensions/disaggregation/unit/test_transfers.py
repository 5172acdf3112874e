"""Timeouts of KV transfers between two servers during a pause.

An expired timeout raises in SGLang's own check here, because there is no server to notify.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.extensions.disaggregation.pause import Transfers

LIMIT_S = 300


def connection(kind: type) -> Any:
    """Return one end of a connection past its timeout."""
    there: Any = object.__new__(kind)
    there.init_time = time.time() - LIMIT_S - 100
    there.kv_mgr = SimpleNamespace(
        waiting_timeout=LIMIT_S,
        bootstrap_timeout=LIMIT_S,
        defer_decode_allocation=False,
    )
    return there


def test_decode_pause_extends_transfer_timeouts() -> None:
    receiver = connection(CommonKVReceiver)
    none = SimpleNamespace(queue=[SimpleNamespace(kv_receiver=None)])
    scheduler: Any = SimpleNamespace(
        disaggregation_mode=DisaggregationMode.DECODE,
        disagg_decode_prealloc_queue=none,
        disagg_decode_transfer_queue=SimpleNamespace(queue=[SimpleNamespace(kv_receiver=receiver)]),
    )
    requests: Any = None
    Transfers(scheduler, requests).extend_request_timeouts(200)
    assert receiver._check_waiting_timeout() is None


def test_prefill_pause_extends_bootstrap_timeouts() -> None:
    sender = connection(CommonKVSender)
    scheduler: Any = SimpleNamespace(disaggregation_mode=DisaggregationMode.PREFILL)
    held = [SimpleNamespace(disagg_kv_sender=sender)]
    requests: Any = SimpleNamespace(live=lambda: held)
    Transfers(scheduler, requests).extend_request_timeouts(200)
    assert sender._check_bootstrap_timeout() is None


def test_timeout_of_request_during_pause_is_not_overextended() -> None:
    sender = connection(CommonKVSender)
    sender.init_time = time.time() - 10
    scheduler: Any = SimpleNamespace(disaggregation_mode=DisaggregationMode.PREFILL)
    requests: Any = SimpleNamespace(live=lambda: [SimpleNamespace(disagg_kv_sender=sender)])
    Transfers(scheduler, requests).extend_request_timeouts(200)
    assert sender.init_time <= time.time()
