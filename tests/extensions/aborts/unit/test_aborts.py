"""Requests that an abort ends, before and after their dispatch."""

from __future__ import annotations

import asyncio
import copy
import enum
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.grpc_bridge import RuntimeHandle
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_inflight.extensions.aborts.aborts import Aborts
from sglang_inflight.extensions.aborts.hooks import (
    abort_request,
    abort_when_dispatched,
    bind_abort_task,
    join_groups,
    leave_to_the_stream,
    name_groups,
)
from sglang_inflight.livepatch import load_series


class Manager:
    """The parts of ``TokenizerManager`` used by the functions under test, and a record of sent
    aborts.
    """

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        # names in the aborts sent to the schedulers
        self.sent: list[str] = []
        aborts = Aborts(self, lambda _: 0)  # type: ignore[arg-type]
        self.inflight: Any = SimpleNamespace(part={Aborts: aborts}.__getitem__)

    def abort_request(self, rid: str) -> None:
        abort_request(lambda _, each: self.sent.append(each), self, rid)  # type: ignore[arg-type]

    def begin(self, obj: Any, *, dispatched: bool = True) -> Any:
        requests = (
            [obj] if getattr(obj, "is_single", True) else [obj[i] for i in range(len(obj.rid))]
        )
        for each in requests:
            self.rid_to_state[each.rid] = SimpleNamespace(obj=each, dispatched=dispatched)
        join_groups(None, self, obj)  # type: ignore[arg-type]
        return requests

    def dispatch(self, rid: str) -> None:
        """Mark a request as dispatched, like SGLang."""
        manager: Any = self
        TokenizerManager._mark_state_dispatched(manager, rid)
        abort_when_dispatched(None, self, rid)  # type: ignore[arg-type]


def ask(rid: Any, *, n: int = 1, prompts: int = 1) -> Any:
    input_ids = [[1, 2]] * prompts if prompts > 1 else [1, 2]
    obj: Any = GenerateReqInput(rid=rid, input_ids=input_ids, sampling_params={"n": n})
    normalize = obj._normalize_rid

    def normalize_rid(num: int) -> None:
        name_groups(obj, num)
        normalize(num)

    obj._normalize_rid = normalize_rid
    obj.normalize_batch_and_arguments()
    del obj._normalize_rid
    return obj


def sample(request: Any) -> Any:
    """Copy a request under a new rid, like SGLang for each of ``n`` samples."""
    made = copy.copy(request)
    made.regenerate_rid()
    return made


def test_abort_matches_whole_names_not_prefixes() -> None:
    manager = Manager()
    for name in ("step", "step1", "step10"):
        manager.begin(ask(name))
    manager.abort_request("step1")
    manager.abort_request("st")
    assert manager.sent == ["step1"]


def test_abort_ends_a_batch_by_name_or_one_item_by_its_own() -> None:
    manager = Manager()
    manager.begin(ask("batch", prompts=3))
    manager.begin(ask("batch1"))
    manager.abort_request("batch_1")
    assert manager.sent == ["batch_1"]
    manager.abort_request("batch")
    assert manager.sent[1:] == ["batch_0", "batch_1", "batch_2"]


@pytest.mark.parametrize("named", ["together", "one_by_one"])
def test_abort_by_client_name_ends_all_samples(named: str) -> None:
    manager = Manager()
    obj = ask("group" if named == "together" else ["one", "two"], n=2, prompts=2)
    requests = manager.begin(obj)
    manager.rid_to_state.clear()
    made = [sample(requests[index]) for index in (0, 0, 1, 1)]
    for each in made:
        manager.begin(each)
    rids = [each.rid for each in made]
    manager.abort_request("group" if named == "together" else "two")
    assert manager.sent == (rids if named == "together" else rids[2:])


def test_abort_prefers_a_request_to_a_group_of_that_name() -> None:
    """SGLang aborts a request by its name when its client leaves."""
    manager = Manager()
    manager.begin(ask("name", prompts=2))
    manager.begin(ask("name"))
    manager.abort_request("name")
    assert manager.sent == ["name"]


def test_early_abort_is_sent_after_dispatch() -> None:
    manager = Manager()
    manager.begin(ask("early"), dispatched=False)
    manager.begin(ask("other"), dispatched=False)
    manager.abort_request("early")
    assert manager.sent == []
    manager.dispatch("other")
    manager.dispatch("early")
    assert manager.sent == ["early"]


def test_early_abort_reaches_samples_made_later() -> None:
    manager = Manager()
    (request, _) = manager.begin(ask("group", n=2), dispatched=False)
    manager.abort_request("group")
    manager.rid_to_state.clear()
    made = sample(request)
    manager.begin(made, dispatched=False)
    manager.dispatch(made.rid)
    assert manager.sent == [made.rid]


@pytest.mark.parametrize("prompts", [1, 2])
def test_abort_after_a_stream_spares_next_request_of_same_name(
    monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """SGLang's abort task runs some time after a stream's end, when a new request may have the
    name.
    """
    manager: Any = Manager()
    first, second = (ask("name", prompts=prompts) for _ in range(2))

    async def start_second(_: float) -> None:
        manager.begin(second)

    manager.begin(first)
    task = bind_abort_task(TokenizerManager.create_abort_task, manager, first)
    monkeypatch.setattr(tokenizer_manager, "asyncio", SimpleNamespace(sleep=start_second))
    asyncio.run(task())
    assert manager.sent == []
    task = bind_abort_task(TokenizerManager.create_abort_task, manager, second)
    asyncio.run(task())
    assert manager.sent == ([second.rid] if prompts == 1 else second.rid)


def test_refused_stream_sends_no_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager: Any = Manager()
    task = bind_abort_task(
        TokenizerManager.create_abort_task, manager, GenerateReqInput(input_ids=[1])
    )
    monkeypatch.setattr(
        tokenizer_manager, "asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0))
    )
    asyncio.run(task())
    assert manager.sent == []


def test_no_sglang_queue_compares_rids_by_prefix() -> None:
    """Prefill servers, decode servers and an encoder's client included."""
    series = load_series()
    patched = {module.file: module.text for module in series.plan().modules}
    for path in (series.root / "sglang" / "srt").rglob("*.py"):
        file = str(path.relative_to(series.root))
        text = patched.get(file) or path.read_text()
        assert not re.search(r"startswith\((recv_req\.)?rid\)", text), file


class Sent(enum.Enum):
    """Rust's reply to a chunk."""

    Pending = enum.auto()
    Closed = enum.auto()


def test_abandoned_grpc_stream_spares_next_request_of_same_name() -> None:
    """A new request has the stream's name when SGLang gives up the stream."""
    manager: Any = Manager()
    first, second = ask("name"), ask("name")
    closed: list[str] = []

    async def generate_request(obj: Any, request: object) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"meta_info": {"finish_reason": None}}
        finally:
            closed.append(obj.rid)

    manager.generate_request = generate_request
    manager.begin(first)
    handle: Any = RuntimeHandle.__new__(RuntimeHandle)
    handle.tokenizer_manager = manager
    handle._BACKPRESSURE_TIMEOUT_S = 0
    handle._install_on_ready = lambda _: asyncio.Event()
    handle._uninstall_on_ready = lambda _: None
    handle._abort_request_id = lambda rid: leave_to_the_stream(handle, rid)

    def take(_: object, **kwargs: Any) -> Sent:
        manager.begin(second)
        return Sent.Pending

    asyncio.run(handle._run_generate(first, take, True, None))
    assert manager.sent == []
    assert closed == ["name"]
