"""The card's rules: each has a program that breaks it, and fails."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.glass.card import in_child, on_card

glass: Any = torch.get_device_module("glass")
GLASS = torch.device("glass", 0)
MIB = 1 << 20


def filled(value: float, count: int = 16) -> torch.Tensor:
    return torch.full((count,), float(value), device=GLASS)


def refused(call: Callable[[], object], *words: str) -> str:
    """Return the error of ``call``, which has all ``words``."""
    with pytest.raises(RuntimeError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# ---- memory of its own ---------------------------------------------------------------------


def test_host_code_that_follows_a_pointer_ends_by_name(tmp_path: Path) -> None:
    def follow() -> None:
        ctypes.string_at(filled(1).data_ptr(), 4)

    ended = in_child(follow, tmp_path)
    assert ended.signal == signal.SIGSEGV
    assert "glass: host code touched device memory" in ended.stderr
    assert "byte 0 of glass:0" in ended.stderr


@on_card(memory=64 * MIB)
def test_out_of_memory_is_torchs_error_and_passes() -> None:
    held = torch.empty(40 * MIB, dtype=torch.uint8, device=GLASS)
    with pytest.raises(torch.OutOfMemoryError, match="glass:0 has 67108864 bytes"):
        torch.empty(40 * MIB, dtype=torch.uint8, device=GLASS)
    del held
    # the cached segment is given back for a request that does not fit beside it
    assert torch.empty(60 * MIB, dtype=torch.uint8, device=GLASS).numel() == 60 * MIB


@on_card(memory=64 * MIB)
def test_free_memory_is_told_in_truth() -> None:
    free, total = glass.mem_get_info()
    assert (free, total) == (64 * MIB, 64 * MIB)
    held = torch.empty(10 * MIB, dtype=torch.uint8, device=GLASS)
    assert glass.mem_get_info()[0] == 54 * MIB
    assert glass.memory_allocated() == 10 * MIB
    del held
    assert glass.memory_allocated() == 0
    assert glass.mem_get_info()[0] == 54 * MIB
    glass.empty_cache()
    assert glass.mem_get_info()[0] == 64 * MIB


@on_card()
def test_freed_block_is_its_own_streams_at_once() -> None:
    first = filled(1)
    address = first.data_ptr()
    del first
    assert filled(2).data_ptr() == address


@on_card()
def test_freed_block_is_no_other_streams() -> None:
    first = filled(1)
    address = first.data_ptr()
    del first
    with glass.stream(glass.Stream()):
        assert filled(2).data_ptr() != address


@on_card()
def test_block_reused_under_another_streams_work_is_found() -> None:
    other = glass.Stream()
    tensor = filled(1)
    other.wait_stream(glass.current_stream())
    with glass.stream(other):
        tensor + 1
    del tensor
    refused(lambda: filled(2), "race", "reuse of freed memory", "'add")


@on_card()
def test_freed_block_may_be_reused_behind_a_wait() -> None:
    other = glass.Stream()
    tensor = filled(1)
    other.wait_stream(glass.current_stream())
    with glass.stream(other):
        copy = tensor + 1
    del tensor
    glass.current_stream().wait_stream(other)
    assert filled(2).tolist() == [2] * 16
    assert copy.tolist() == [2] * 16


@on_card()
def test_recorded_block_waits_for_the_recorded_stream() -> None:
    other = glass.Stream()
    tensor = filled(1)
    address = tensor.data_ptr()
    other.wait_stream(glass.current_stream())
    release = glass.hold(other)
    with glass.stream(other):
        copy = tensor + 1
    tensor.record_stream(other)
    del tensor
    assert filled(2).data_ptr() != address
    release()
    other.synchronize()
    assert copy.tolist() == [2] * 16
    assert address in {filled(3).data_ptr(), filled(3).data_ptr()}


@on_card()
def test_memory_of_a_freed_block_holds_nan() -> None:
    first = filled(1)
    del first
    assert torch.empty(16, device=GLASS).isnan().all().item()


@on_card(memory=64 * MIB)
def test_touching_released_pages_loses_the_device() -> None:
    tensor = torch.ones(4 * MIB, dtype=torch.uint8, device=GLASS)
    glass.synchronize()
    before = glass.mem_get_info()[0]
    glass.discard(tensor.untyped_storage())
    assert glass.mem_get_info()[0] == before + 4 * MIB
    glass.restore(tensor.untyped_storage())
    assert tensor.sum().item() == 0
    glass.discard(tensor.untyped_storage())
    refused(lambda: tensor.add_(1), "released memory", "'add.out")
    refused(lambda: filled(1), "the device is lost")


# ---- streams and events -----------------------------------------------------------------------


@on_card()
def test_host_runs_ahead_of_a_stream() -> None:
    tensor = filled(1)
    release = glass.hold()
    tensor.add_(1)
    assert not glass.current_stream().query()
    release()
    assert tensor.tolist() == [2] * 16


@on_card()
@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_missing_wait_is_found_at_the_launch(kind: str) -> None:
    tensor = filled(1)
    with glass.stream(glass.Stream()):
        found = refused(lambda: tensor + 1 if kind == "reads" else tensor.add_(1), "race", kind)
    assert "'fill_" in found
    assert len(glass.races()) == 1


@on_card()
def test_write_under_another_streams_read_is_found() -> None:
    tensor = filled(1)
    other = glass.Stream()
    other.wait_stream(glass.current_stream())
    with glass.stream(other):
        tensor + 1
    refused(lambda: tensor.add_(1), "race", "writes", "'add")


@on_card()
@pytest.mark.parametrize("by", ["stream", "event", "host", "query"])
def test_waits_order_two_streams(by: str) -> None:
    tensor = filled(1)
    first, other = glass.current_stream(), glass.Stream()
    if by == "stream":
        other.wait_stream(first)
    elif by == "event":
        other.wait_event(first.record_event())
    elif by == "host":
        first.synchronize()
    else:
        event = first.record_event()
        while not event.query():
            os.sched_yield()
    with glass.stream(other):
        assert (tensor + 1).tolist() == [2] * 16


@on_card()
def test_event_covers_only_what_came_before_it() -> None:
    tensor = filled(1)
    event = glass.current_stream().record_event()
    tensor.add_(1)
    other = glass.Stream()
    other.wait_event(event)
    with glass.stream(other):
        refused(lambda: tensor + 1, "race", "'add.out")


@on_card()
def test_event_waits_for_its_stream_alone() -> None:
    other = glass.Stream()
    release = glass.hold(other)
    event = glass.current_stream().record_event()
    late = other.record_event()
    event.synchronize()
    assert not late.query()
    release()
    late.synchronize()


@on_card()
def test_streams_of_a_pool_come_again() -> None:
    ids = [glass.Stream().stream_id for _ in range(33)]
    assert len(set(ids)) == 32
    assert ids[32] == ids[0]
    # the default stream and the current one are no new ones
    assert [glass.default_stream().stream_id, glass.current_stream().stream_id] == [0, 0]
    assert glass.Stream().stream_id == ids[1]
    assert glass.Stream(priority=-1).stream_id not in ids


@on_card()
def test_current_stream_belongs_to_a_thread() -> None:
    seen: list[int] = []
    with glass.stream(glass.Stream()):
        thread = threading.Thread(target=lambda: seen.append(glass.current_stream().stream_id))
        thread.start()
        thread.join()
    assert seen == [0]


@on_card()
def test_wrong_index_shows_later_and_loses_the_device() -> None:
    tensor, beyond = filled(1), torch.tensor([99], device=GLASS)
    release = glass.hold()
    torch.index_select(tensor, 0, beyond)
    release()
    refused(glass.synchronize, "index_select")
    refused(lambda: filled(1), "the device is lost", "index_select")
    assert "index_select" in glass.error()


def order_of(seed: int, folder: Path) -> Any:
    """Return the order in which two streams did their work, with one thread and ``seed``."""

    def work() -> list[int]:
        done = torch.zeros(64, dtype=torch.int64, device=GLASS)
        at = torch.zeros(1, dtype=torch.int64, device=GLASS)
        glass.synchronize()
        for number in range(8):
            with glass.stream(glass.Stream()):
                # unordered on purpose: the order is what this program asks for
                done.index_put_((at,), torch.full_like(at, number), accumulate=False)
                at.add_(1)
        glass.synchronize()
        return list(done[:8].tolist())

    ended = in_child(work, folder, late=1, seed=seed, races="off")
    assert not ended.error, ended.error
    return ended.value


def test_seed_repeats_an_order_and_another_one_changes_it(tmp_path: Path) -> None:
    orders = [order_of(seed, tmp_path) for seed in (1, 1, 2, 3, 4)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1


# ---- copies and pinned memory ----------------------------------------------------------------


@on_card()
def test_item_waits() -> None:
    tensor = filled(1)
    release = glass.hold()
    tensor.add_(1)
    threading.Timer(0.05, release).start()
    assert tensor[0].item() == 2


@on_card()
def test_copy_to_pinned_memory_is_late() -> None:
    host = torch.zeros(16, pin_memory=True)
    tensor = filled(1)
    release = glass.hold()
    host.copy_(tensor, non_blocking=True)
    assert host.tolist() == [0] * 16
    release()
    glass.synchronize()
    assert host.tolist() == [1] * 16


@on_card()
def test_copy_to_pageable_memory_waits() -> None:
    host = torch.zeros(16)
    tensor = filled(1)
    release = glass.hold()
    threading.Timer(0.05, release).start()
    host.copy_(tensor, non_blocking=True)
    assert host.tolist() == [1] * 16


@on_card()
@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_source_is_read_late_and_pageable_at_once(pinned: bool) -> None:
    host = torch.ones(16, pin_memory=pinned)
    tensor = filled(0)
    release = glass.hold()
    tensor.copy_(host, non_blocking=True)
    host.fill_(5)
    release()
    assert tensor.tolist() == [5 if pinned else 1] * 16


@on_card()
def test_pinned_block_freed_without_torchs_copy_is_anybodys() -> None:
    host = torch.ones(16, pin_memory=True)
    address = host.data_ptr()
    del host
    assert torch.empty(16, pin_memory=True).data_ptr() == address


@on_card()
def test_pinned_block_waits_for_torchs_copy() -> None:
    host = torch.ones(16, pin_memory=True)
    address = host.data_ptr()
    tensor = filled(0)
    release = glass.hold()
    tensor.copy_(host, non_blocking=True)
    del host
    other = torch.empty(16, pin_memory=True)
    assert other.data_ptr() != address
    release()
    assert tensor.tolist() == [1] * 16
    assert torch.empty(16, pin_memory=True).data_ptr() == address


@on_card()
def test_tensor_may_be_given_memory_elsewhere() -> None:
    weight = torch.nn.Parameter(filled(3), requires_grad=False)
    weight.data = weight.data.cpu()
    assert weight.device.type == "cpu"
    assert weight.tolist() == [3] * 16
    weight.data = weight.data.to(GLASS)
    assert weight.device == GLASS
    assert (weight + 1).tolist() == [4] * 16


# ---- kernels over addresses ------------------------------------------------------------------


def table_of(*rows: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=GLASS)


@on_card()
def test_exchange_swaps_values_at_their_places() -> None:
    live = torch.arange(8, dtype=torch.int16, device=GLASS)
    values = torch.tensor([70, 60], dtype=torch.int16).pin_memory()
    places = torch.tensor([5, 1], dtype=torch.uint16, device=GLASS)
    glass.launch_exchange(table_of((live.data_ptr(), values.data_ptr(), places.data_ptr(), 2)), 2)
    glass.synchronize()
    assert live.tolist() == [0, 60, 2, 3, 4, 70, 6, 7]
    assert values.tolist() == [5, 1]


@on_card()
@pytest.mark.parametrize("pinned", [True, False])
def test_forward_must_wait_for_an_exchange(pinned: bool) -> None:
    live, values = filled(0), torch.ones(16).pin_memory() if pinned else filled(1)
    table = table_of((live.data_ptr(), values.data_ptr(), 0, 16))
    glass.synchronize()
    glass.launch_exchange(table, 4)
    with glass.stream(glass.Stream()):
        refused(lambda: live + 1, "race", "'exchange'", "writes")
        glass.current_stream().wait_stream(glass.default_stream())
        assert (live + 1).tolist() == [2.0] * 16


@on_card()
def test_exchange_must_wait_for_a_forward() -> None:
    live, values, forwards = filled(0), filled(1), glass.Stream()
    table = table_of((live.data_ptr(), values.data_ptr(), 0, 16))
    glass.synchronize()
    with glass.stream(forwards):
        read = live + 1
    refused(lambda: glass.launch_exchange(table, 4), "race: 'exchange'", "writes")
    glass.current_stream().wait_stream(forwards)
    glass.launch_exchange(table, 4)
    assert live.tolist() == [1.0] * 16
    assert read.numel() == 16


@on_card()
@pytest.mark.parametrize("wrong", ["unpinned", "freed", "beyond", "crooked", "nowhere"])
def test_illegal_address_loses_the_device_by_name(wrong: str) -> None:
    live = torch.zeros(128, dtype=torch.int16, device=GLASS)
    values = torch.zeros(128, dtype=torch.int16, device=GLASS)
    words: tuple[str, ...]
    said, words = values.data_ptr(), ("illegal address of new values",)
    count = 128
    if wrong == "unpinned":
        host = torch.zeros(128, dtype=torch.int16)
        said, words = host.data_ptr(), ("new values", "memory of the host", "nor pinned")
    elif wrong == "freed":
        words = ("new values", "free block")
    elif wrong == "beyond":
        count, words = 500, ("new values", "used block of 512 bytes")
    elif wrong == "crooked":
        said, words = said + 1, ("new values is not aligned",)
    else:
        said, words = 4096, ("new values", "memory of the host")
    table = table_of((live.data_ptr(), said, 0, count))
    if wrong == "freed":
        del values
    glass.launch_exchange(table, 2)
    refused(glass.synchronize, *words)
    refused(lambda: live + 1, "the device is lost", *words)


# ---- graphs ----------------------------------------------------------------------------------


@on_card()
def test_replay_uses_the_addresses_of_the_capture() -> None:
    tensor = filled(1)
    graph = glass.Graph()
    with glass.graph(graph):
        made = tensor * 2
    old = tensor
    tensor = filled(5)
    old.fill_(3)
    graph.replay()
    assert made.tolist() == [6] * 16


@on_card()
def test_capture_does_not_run_its_work() -> None:
    tensor = filled(1)
    graph = glass.Graph()
    with glass.graph(graph):
        tensor.add_(1)
    assert tensor.tolist() == [1] * 16
    graph.replay()
    graph.replay()
    assert tensor.tolist() == [3] * 16


@on_card()
def test_graphs_memory_is_no_others() -> None:
    tensor = filled(1)
    graph = glass.Graph()
    with glass.graph(graph):
        middle = tensor * 2
        address = middle.data_ptr()
        del middle
        reused = tensor * 3
    assert reused.data_ptr() == address
    del reused
    with glass.stream(glass.graph.default_capture_stream):
        assert torch.empty(16, device=GLASS).data_ptr() != address


@on_card()
def test_replay_draws_new_numbers() -> None:
    graph = glass.Graph()
    glass.synchronize()
    with glass.graph(graph):
        made = torch.rand(16, device=GLASS)
    graph.replay()
    first = made.tolist()
    graph.replay()
    assert made.tolist() != first


def test_wait_in_a_capture_breaks_it(tmp_path: Path) -> None:
    def capture(call: Callable[[torch.Tensor], object]) -> None:
        tensor = filled(1)

        def work() -> None:
            with glass.graph(glass.Graph()):
                tensor.add_(1)
                refused(lambda: call(tensor), "not permitted")

        refused(work, "the capture is invalid")

    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "item": lambda tensor: tensor[0].item(),
        "copy to the host": lambda tensor: tensor.cpu(),
        "synchronize": lambda tensor: glass.synchronize(),
        "stream's wait": lambda tensor: glass.current_stream().synchronize(),
        "mask": lambda tensor: tensor[tensor > 0],
        "empty_cache": lambda tensor: glass.empty_cache(),
    }
    for name, call in calls.items():
        ended = in_child(lambda call=call: capture(call), tmp_path)  # type: ignore[misc]
        assert not ended.error, (name, ended.error)


@on_card()
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("call", ["query", "allocate", "synchronize"])
def test_other_threads_call_breaks_a_global_capture_alone(mode: str, call: str) -> None:
    tensor = filled(1)
    event = glass.current_stream().record_event()
    calls: dict[str, Callable[[], object]] = {
        "query": event.query,
        "synchronize": event.synchronize,
        "allocate": lambda: torch.empty(32 * MIB, dtype=torch.uint8, device=GLASS),
    }
    said: list[str] = []

    def beside() -> None:
        try:
            calls[call]()
        except RuntimeError as error:
            said.append(str(error))

    graph = glass.Graph()

    def capture() -> None:
        with glass.graph(graph, capture_error_mode=mode):
            tensor.add_(1)
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
            tensor.add_(1)

    if mode == "global":
        refused(capture, "the capture is invalid")
        assert "forbids it to this thread" in said[0]
    else:
        capture()
        assert not said


@on_card()
def test_capture_needs_its_side_streams_back() -> None:
    tensor = filled(1)
    side = glass.Stream()

    def capture(joins: bool) -> glass.Graph:
        graph = glass.Graph()
        with glass.graph(graph):
            side.wait_stream(glass.current_stream())
            with glass.stream(side):
                tensor.add_(1)
            if joins:
                glass.current_stream().wait_stream(side)
        return graph

    refused(lambda: capture(False), "did not wait for")
    capture(True).replay()
    assert tensor.tolist() == [2] * 16


@on_card()
def test_capture_cannot_wait_for_work_outside_of_it() -> None:
    tensor = filled(1)
    event = glass.current_stream().record_event()

    def capture() -> None:
        with glass.graph(glass.Graph()):
            tensor.add_(1)
            glass.current_stream().wait_event(event)

    refused(capture, "outside of the capture")


@on_card()
def test_race_within_a_capture_is_found() -> None:
    tensor = filled(1)
    side = glass.Stream()

    def capture() -> None:
        with glass.graph(glass.Graph()):
            side.wait_stream(glass.current_stream())
            tensor.add_(1)
            with glass.stream(side):
                tensor.mul_(2)
            glass.current_stream().wait_stream(side)

    refused(capture)
    assert "'mul.out' (stream" in glass.races()[0]


@on_card()
def test_replay_is_ordered_like_any_launch() -> None:
    tensor = filled(1)
    graph = glass.Graph()
    with glass.graph(graph):
        tensor.add_(1)
    with glass.stream(glass.Stream()):
        tensor_of_other = filled(2)
        graph.replay()
    refused(lambda: tensor + 1, "race", "'graph'")
    del tensor_of_other


# ---- processes and devices ------------------------------------------------------------------


@on_card()
def test_other_process_reads_and_writes_shared_memory() -> None:
    tensor = filled(1)
    glass.synchronize()
    handle = glass.share(tensor)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # a fork cannot use the card it inherits: a handle goes to a process of its own
        refused(lambda: filled(1), "forked process")
        os.write(write, b"refused")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 7) == b"refused"
    opened = glass.open_shared(handle)
    assert opened.view(torch.float32)[:16].tolist() == [1] * 16
    assert opened.data_ptr() != tensor.data_ptr()
    opened.view(torch.float32)[:16].fill_(7)
    glass.synchronize()
    assert tensor.tolist() == [7] * 16


def test_memory_of_another_process_is_shared_by_a_handle(tmp_path: Path) -> None:
    ready, sent = os.pipe()
    done, end = os.pipe()

    def owner() -> list[float]:
        tensor = filled(1)
        glass.synchronize()
        os.write(sent, pickle.dumps(glass.share(tensor)))
        assert os.read(done, 1) == b"x"
        return list(tensor.tolist())

    def reader() -> list[float]:
        opened = glass.open_shared(pickle.loads(os.read(ready, 4096))).view(torch.float32)
        seen = opened[:16].tolist()
        opened[:16].fill_(7)
        glass.synchronize()
        os.write(end, b"x")
        return list(seen)

    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(in_child(owner, tmp_path)))
    thread.start()
    read = in_child(reader, tmp_path)
    thread.join()
    assert not ends[0].error, ends[0].error
    assert (read.error, read.signal) == ("", 0), read
    assert read.value == [1] * 16
    assert ends[0].value == [7] * 16


@on_card(devices=2)
def test_devices_do_not_mix() -> None:
    here, there = filled(1), torch.ones(16, device="glass:1")
    refused(lambda: here + there, "same device")
    moved = there.to(GLASS)
    assert (here + moved).tolist() == [2] * 16


@on_card(devices=2)
def test_copy_between_devices_is_ordered_on_both() -> None:
    here, there = filled(1), torch.zeros(16, device="glass:1")
    release = glass.hold()
    there.copy_(here)
    with glass.device(1):
        there.add_(1)
    release()
    assert there.tolist() == [2] * 16


@on_card()
def test_tensor_of_the_host_is_refused_in_an_operation() -> None:
    refused(lambda: filled(1) + torch.ones(16), "same device")
    assert (filled(1) + torch.tensor(2.0)).tolist() == [3] * 16
