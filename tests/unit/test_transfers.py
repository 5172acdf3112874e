"""Time limits of what goes on between two servers, while one of them is paused.

Where they are over SGLang's own look at them raises here: it has no server to tell.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.scheduler.pause.transfers import Transfers

LIMIT_S = 300


def connection(kind: type) -> Any:
    """One end, which has waited for longer than it may."""
    there: Any = object.__new__(kind)
    there.init_time = time.time() - LIMIT_S - 100
    there.kv_mgr = SimpleNamespace(
        waiting_timeout=LIMIT_S,
        bootstrap_timeout=LIMIT_S,
        defer_decode_allocation=False,
    )
    return there


def test_a_decode_server_forgives_its_requests_its_pause() -> None:
    receiver = connection(CommonKVReceiver)
    none = SimpleNamespace(queue=[SimpleNamespace(kv_receiver=None)])
    scheduler: Any = SimpleNamespace(
        disaggregation_mode=DisaggregationMode.DECODE,
        disagg_decode_prealloc_queue=none,
        disagg_decode_transfer_queue=SimpleNamespace(queue=[SimpleNamespace(kv_receiver=receiver)]),
    )
    boundary: Any = None
    Transfers(scheduler, boundary).extend_request_timeouts(200)
    assert receiver._check_waiting_timeout() is None


def test_a_prefill_server_forgives_its_requests_its_pause() -> None:
    sender = connection(CommonKVSender)
    scheduler: Any = SimpleNamespace(disaggregation_mode=DisaggregationMode.PREFILL)
    held = [SimpleNamespace(disagg_kv_sender=sender)]
    boundary: Any = SimpleNamespace(live_requests=lambda: held)
    Transfers(scheduler, boundary).extend_request_timeouts(200)
    assert sender._check_bootstrap_timeout() is None


def test_one_that_came_amid_the_pause_has_no_more_time_than_others() -> None:
    sender = connection(CommonKVSender)
    sender.init_time = time.time() - 10
    scheduler: Any = SimpleNamespace(disaggregation_mode=DisaggregationMode.PREFILL)
    boundary: Any = SimpleNamespace(
        live_requests=lambda: [SimpleNamespace(disagg_kv_sender=sender)]
    )
    Transfers(scheduler, boundary).extend_request_timeouts(200)
    assert sender.init_time <= time.time()
