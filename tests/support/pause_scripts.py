"""Scripts for SGLang's scripted runtime. They run in the scheduler, one step per pass.

For each call, a script waits until SGLang's own message of that call arrives.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from sglang.test.scripted_runtime_chunked_helpers import advance_to_decode_step, run_until_finished

PASSES = 5


def freezes_in_place(t: Any) -> Iterator[None]:
    request = yield from _running(t)
    t.pause_generation(mode="in_place")
    yield
    assert request.req not in t.scheduler.waiting_queue
    yield from _expect_frozen(request)
    yield from _expect_end(t, request)


def parks_in_the_waiting_queue(t: Any) -> Iterator[None]:
    request = yield from _running(t)
    t.pause_generation(mode="retract")
    yield
    assert request.req in t.scheduler.waiting_queue
    yield from _expect_frozen(request)
    assert request.req in t.scheduler.waiting_queue
    yield from _expect_end(t, request)


def _running(t: Any) -> Generator[None, None, Any]:
    request = t.start_req(prompt_len=16, max_new_tokens=8, ignore_eos=True)
    yield from advance_to_decode_step(request, 1)
    return request


def _expect_frozen(request: Any) -> Iterator[None]:
    tokens = list(request.req.output_ids)
    for _ in range(PASSES):
        yield
        assert list(request.req.output_ids) == tokens


def _expect_end(t: Any, request: Any) -> Iterator[None]:
    t.continue_generation(torch_empty_cache=True)
    yield from run_until_finished(request)
