"""Communicators: a collective is a launch, which occupies its stream until all ranks are in it."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.utils.network import get_free_port
from torch._C._distributed_c10d import HashStore, PrefixStore

from harness.glass import communicator
from sglang_inflight.scheduler.groups.groups import Group
from sglang_inflight.scheduler.groups.process_group import Formed, form_group
from sglang_inflight.vocabulary.errors import Dropped, Refused
from tests.glass.card import Ended, on_card
from tests.glass.ranks import PATIENCE_S, on_ranks, values

glass: Any = torch.get_device_module("glass")
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def new_group(name: str, **fields: Any) -> dist.ProcessGroup:
    """Return a group of all ranks that has had its first collective."""
    group = dist.new_group(backend="glass", group_desc=name, **fields)
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(filled(0), group=group)
    glass.synchronize()
    return group


def filled(value: float, count: int = 16) -> torch.Tensor:
    return torch.full((count,), float(value), device="glass")


def shared_store() -> Any:
    """Return the store of all ranks, for what they tell each other beside the cards."""
    return PrefixStore("test", dist.distributed_c10d._get_default_store())


def noop() -> None:
    pass


def begun(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


# ---- results -------------------------------------------------------------------------------------


def results(rank: int, size: int, device: str, group: Any) -> dict[str, list[Any]]:
    """Return the results of each collective, called as SGLang and updates call them."""
    found: dict[str, list[Any]] = {}

    def given(dtype: torch.dtype = torch.float32, rows: int = size) -> torch.Tensor:
        numbers = torch.arange(rows * 6).reshape(rows, 6) % 7 + 10 * rank
        return numbers.to(dtype).to(device)

    def note(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [tensor.cpu().float().tolist() for tensor in tensors]

    def empty(rows: int) -> torch.Tensor:
        return torch.zeros(rows, 6, device=device)

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            tensor = given(dtype) % 4
            dist.all_reduce(tensor, op, group=group)
            note(f"all_reduce {op} {dtype}", tensor)
    gathered = empty(size * size)
    dist.all_gather_single(gathered, given(), group=group)
    note("all_gather_single", gathered)
    listed = [empty(size) for _ in range(size)]
    dist.all_gather(listed, given(), group=group)
    note("all_gather", *listed)
    scattered = empty(1)
    dist.reduce_scatter_single(scattered, given(), group=group)
    note("reduce_scatter_single", scattered)
    rows = [row.clone() for row in given().split(1)]
    dist.reduce_scatter(scattered, rows, group=group)
    note("reduce_scatter", scattered)
    tensor = given()
    dist.broadcast(tensor, src=1, group=group)
    note("broadcast", tensor)
    tensor = given()
    dist.reduce(tensor, dst=0, group=group)
    if rank == 0:
        note("reduce", tensor)
    listed = [empty(size) for _ in range(size)]
    dist.gather(given(), listed if rank == 1 else None, dst=1, group=group)
    note("gather", *listed)
    dist.scatter(scattered, rows if rank == 0 else None, src=0, group=group)
    note("scatter", scattered)
    exchanged = empty(size)
    dist.all_to_all_single(exchanged, given(), group=group)
    note("all_to_all_single", exchanged)
    # rank r sends 1 row to rank 0, and 2 rows to each other rank
    sent = [1] + [2] * (size - 1)
    taken = empty(size if rank == 0 else 2 * size)
    dist.all_to_all_single(taken, given(rows=sum(sent)), [sent[rank]] * size, sent, group=group)
    note("all_to_all_single, uneven", taken)
    listed = [empty(1) for _ in range(size)]
    dist.all_to_all(listed, rows, group=group)
    note("all_to_all", *listed)
    tensor = given()
    if rank == 0:
        dist.send(tensor, 1, group=group)
    elif rank == 1:
        dist.recv(tensor, 0, group=group)
    note("send and recv", tensor)
    before, behind = (rank - 1) % size, (rank + 1) % size
    received = empty(size)
    calls = [
        dist.P2POp(dist.isend, given(), behind, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    note("batch_isend_irecv", received)
    dist.barrier(group=group)
    return found


@pytest.mark.parametrize(("ranks", "is_late"), [(2, 0), (3, 0), (2, 1)])
def test_each_collective_has_gloos_result(tmp_path: Path, ranks: int, is_late: int) -> None:
    def program(rank: int) -> None:
        gloo = dist.new_group(backend="gloo")
        expected = results(rank, ranks, "cpu", gloo)
        assert results(rank, ranks, "glass", None) == expected

    values(on_ranks(program, tmp_path, ranks=ranks, late=is_late, delay_us=300))


def test_average_and_booleans_are_reduced_as_by_nccl(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        tensor = filled(rank + 1)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.cpu().unique().tolist() == [1.5]
        flags = torch.tensor([rank == 0, rank == 1, False], device="glass")
        dist.all_reduce(flags)
        assert flags.cpu().tolist() == [True, True, False]
        eighths = filled(0.5).to(torch.float8_e4m3fn)
        dist.all_reduce(eighths)
        assert eighths.cpu().float().unique().tolist() == [1.0]

    values(on_ranks(program, tmp_path))


def test_what_nccl_refuses_is_refused(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="must be contiguous"):
            dist.all_reduce(filled(1, 16).reshape(4, 4).t())
        with pytest.raises(RuntimeError, match="NCCL has no data type for Short"):
            dist.all_reduce(filled(1).to(torch.int16))
        with pytest.raises(RuntimeError, match="no such reduction"):
            dist.all_reduce(filled(1).to(torch.int32), dist.ReduceOp.BAND)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(1))

    values(on_ranks(program, tmp_path))


# ---- a launch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_host_does_not_wait_for_another_rank(tmp_path: Path, is_async: bool) -> None:
    def program(rank: int) -> None:
        new_group("warm")
        dist.all_reduce(filled(0))
        store = shared_store()
        if rank == 1:
            # rank 0 has called, and gone on
            store.wait(["called"])
        tensor = filled(rank + 1)
        work = dist.all_reduce(tensor, async_op=is_async)
        after = tensor.clone() if work is None else None
        if rank == 0:
            assert not glass.current_stream().query() if work is None else not work.is_completed()
            store.set("called", "")
        if work is not None:
            work.wait()
            after = tensor.clone()
        assert after is not None
        assert after.cpu().unique().tolist() == [3.0]
        assert work is None or work.is_completed()

    values(on_ranks(program, tmp_path))


def test_late_rank_delays_its_peers_collectives_and_nothing_else(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.all_reduce(filled(0))
        glass.synchronize()
        store = shared_store()
        tensor = filled(rank + 1)
        release = glass.hold() if rank == 2 else None
        work = begun(tensor)
        if release is None:
            other = filled(5) + 1
            assert other.cpu().unique().tolist() == [6.0]
            assert not work.is_completed()
            store.set(f"went on {rank}", "")
        else:
            store.wait(["went on 0", "went on 1"])
            release()
        work.wait()
        assert tensor.cpu().unique().tolist() == [6.0]

    values(on_ranks(program, tmp_path, ranks=3))


def test_missing_wait_for_the_result_is_a_race(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        tensor = filled(1)
        work = begun(tensor)
        with pytest.raises(RuntimeError, match=r"race: .*all_reduce"):
            tensor + 1
        work.wait()
        assert (tensor + 1).cpu().unique().tolist() == [3.0]

    values(on_ranks(program, tmp_path))


def test_write_into_an_input_that_is_still_read_is_a_race(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        tensor, gathered = filled(1), filled(0, 32)
        work: Any = dist.all_gather_single(gathered, tensor, async_op=True)
        with pytest.raises(RuntimeError, match=r"race: .*all_gather"):
            tensor.fill_(2)
        work.wait()
        tensor.fill_(2)

    values(on_ranks(program, tmp_path))


def test_collective_waits_for_work_of_the_current_stream(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.all_reduce(filled(0))
        glass.synchronize()
        tensor = filled(1)
        release = glass.hold()
        tensor.add_(rank)
        work = begun(tensor)
        release()
        work.wait()
        assert tensor.cpu().unique().tolist() == [3.0]

    values(on_ranks(program, tmp_path))


def test_tensors_of_a_dropped_work_live_until_its_end(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.all_reduce(filled(0))
        store = shared_store()
        glass.synchronize()
        used = glass.memory_allocated()
        if rank == 1:
            store.wait(["dropped"])
        begun(filled(1, 1 << 16))
        if rank == 0:
            assert glass.memory_allocated() == used + (1 << 18)
            store.set("dropped", "")
        glass.synchronize()
        begun(filled(1)).wait()
        assert glass.memory_allocated() == used

    values(on_ranks(program, tmp_path))


def test_barrier_is_waited_for_by_the_host(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.barrier()
        store = shared_store()
        if rank == 0:
            store.set("before", "")
        dist.barrier()
        assert store.check(["before"])

    values(on_ranks(program, tmp_path))


# ---- graphs --------------------------------------------------------------------------------------


def test_replayed_collective_uses_its_captured_addresses(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        group = new_group("tp")
        static = filled(0)
        graph = glass.Graph()
        with glass.graph(graph):
            doubled = static * 2
            dist.all_reduce(doubled, group=group)
            begun(static, group).wait()
            result = doubled + static
        for value in (1, 5):
            static.fill_(value + rank)
            graph.replay()
            assert result.cpu().unique().tolist() == [3 * (2 * value + 1)]

    values(on_ranks(program, tmp_path))


def test_communicator_is_not_made_in_a_capture(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        static = filled(0)
        glass.synchronize()
        with (
            pytest.raises(RuntimeError, match="making of a communicator"),
            glass.graph(glass.Graph()),
        ):
            dist.all_reduce(static)

    values(on_ranks(program, tmp_path))


# ---- two communicators ---------------------------------------------------------------------------


def is_reached(said: str) -> bool:
    return any(said in line for line in communicator.collectives())


def is_begun(name: str, work: Any) -> bool:
    return is_reached(f"'{name}'") or work.is_completed()


def in_two_orders(tmp_path: Path, places: int, *, is_swapped: bool) -> list[Ended]:
    def program(rank: int) -> None:
        names = ["forwards", "updates"]
        groups = {name: new_group(name) for name in names}
        if rank == 1 and is_swapped:
            names.reverse()
        tensors = [filled(rank + 1) for _ in names]
        for name, tensor in zip(names, tensors, strict=True):
            work = begun(tensor, groups[name])
            until(functools.partial(is_begun, name, work))
        glass.synchronize()
        for tensor in tensors:
            assert tensor.cpu().unique().tolist() == [3.0]

    return on_ranks(program, tmp_path, collectives=places, watchdog_s=2)


def test_two_communicators_in_two_orders_hang_and_are_named(tmp_path: Path) -> None:
    ends = in_two_orders(tmp_path, 1, is_swapped=True)
    for rank, (first, second) in enumerate([("forwards", "updates"), ("updates", "forwards")]):
        said = ends[rank].error
        assert f"communicator '{first}', rank {rank}, waits for rank {1 - rank};" in said
        assert f"communicator '{second}', rank {rank}, waits for a place on glass:0" in said


@pytest.mark.parametrize(("places", "is_swapped"), [(1, False), (2, True)])
def test_two_communicators_pass_in_one_order_or_with_two_places(
    tmp_path: Path, places: int, is_swapped: bool
) -> None:
    values(in_two_orders(tmp_path, places, is_swapped=is_swapped))


def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        group = new_group("tp")
        if rank == 0:
            dist.all_reduce(filled(1), group=group)
        else:
            dist.all_reduce(filled(1, 8), group=group)
        glass.synchronize()

    for rank, ended in enumerate(on_ranks(program, tmp_path)):
        assert f"rank {1 - rank} is in another collective: " in ended.error
        assert f"ALLREDUCE of {[64, 32][1 - rank]} bytes" in ended.error


# ---- failures ------------------------------------------------------------------------------------


def test_abort_ends_a_waiting_collective_and_leaves_the_device(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        group = new_group("updates")
        if rank == 1:
            tensor = filled(0)
            work: Any = dist.broadcast(tensor, src=0, group=group, async_op=True)
            assert not work.is_completed()
            dist.distributed_c10d._abort_process_group(group)
            until(work.is_completed)
            assert "was aborted" in str(work.exception())
            backend: Any = group._get_backend(torch.device("glass"))
            with pytest.raises(RuntimeError, match="aborted"):
                backend.broadcast([tensor])
        both = filled(1)
        dist.all_reduce(both)
        assert both.cpu().unique().tolist() == [2.0]

    values(on_ranks(program, tmp_path))


@pytest.mark.parametrize("handling", ["2", "3"])
def test_time_limit_ends_the_device_unless_it_is_to_end_the_communicator(
    tmp_path: Path, handling: str
) -> None:
    def program(rank: int) -> str:
        os.environ[HANDLING] = handling
        group = new_group("updates", timeout=timedelta(seconds=5))
        dist.set_timeout(timedelta(milliseconds=100), group)
        other = new_group("forwards")
        if rank == 1:
            work: Any = dist.broadcast(filled(0), src=0, group=group, async_op=True)
            if handling == "3":
                until(lambda: bool(glass.error()))
                return str(glass.error())
            until(work.is_completed)
            assert not glass.error()
        tensor = filled(1)
        if handling == "2":
            dist.all_reduce(tensor, group=other)
            assert tensor.cpu().unique().tolist() == [2.0]
        return str(work.exception()) if rank == 1 else ""

    said = values(on_ranks(program, tmp_path))[1]
    assert "timeout: broadcast" in said
    assert "communicator 'updates', rank 1, waits for rank 0" in said


def test_dead_peer_is_waited_for_and_named(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        group = new_group("tp")
        if rank == 1:
            os._exit(0)
        dist.all_reduce(filled(1), group=group)
        glass.synchronize()

    said = on_ranks(program, tmp_path, watchdog_s=1)[0].error
    assert "communicator 'tp', rank 0, waits for rank 1" in said


# ---- a trainer's group ---------------------------------------------------------------------------


def test_trainers_broadcasts_are_received_and_a_missing_one_costs_its_group(
    tmp_path: Path,
) -> None:
    address = f"tcp://127.0.0.1:{get_free_port()}"

    def send(group: dist.ProcessGroup, *numbers: int) -> None:
        for number in numbers:
            dist.broadcast(filled(number), src=0, group=group)
        glass.synchronize()

    def receive(formed: Formed, store: Any) -> None:
        group = Group("updates", formed)

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for _ in range(2):
                buffer = filled(0)
                yield buffer, buffer

        def received(transfer_id: str) -> list[float]:
            return [float(one.max()) for one in group.receive_each(expected(), noop, transfer_id)]

        def drop() -> None:
            raise Dropped("enough")

        assert received("first") == [1, 2]
        group.post_ahead("second", expected)
        until(lambda: is_reached("rank 1, waits for rank 0"))
        store.set("posted", "")
        assert received("second") == [3, 4]
        group.post_ahead("third", expected)
        with pytest.raises(Dropped):
            list(group.receive_each(expected(), drop, "third"))
        assert not group.is_waiting
        with pytest.raises(Refused, match="is broken"):
            received("fourth")

    def program(rank: int) -> None:
        timeout = timedelta(seconds=PATIENCE_S)
        formed = form_group(
            "glass", address, name="updates", rank=rank, world_size=2, timeout=timeout
        )
        forwards = new_group("forwards")
        store = shared_store()
        if rank == 0:
            send(formed.group, 1, 2)
            store.wait(["posted"])
            send(formed.group, 3, 4)
        else:
            receive(formed, store)
        tensor = filled(1)
        dist.all_reduce(tensor, group=forwards)
        assert tensor.cpu().unique().tolist() == [2.0]

    values(on_ranks(program, tmp_path))


# ---- several devices of one process --------------------------------------------------------------


@on_card(devices=2, watchdog_s=20)
def test_devices_of_one_process_form_a_communicator() -> None:
    store = HashStore()
    sums: list[Any] = [None, None]

    def run(rank: int) -> None:
        glass.set_device(rank)
        made = communicator.make(store, rank, 2, timedelta(seconds=20))
        tensor = torch.full((4,), rank + 1.0, device=f"glass:{rank}")
        made.allreduce([tensor]).wait()
        sums[rank] = tensor.cpu().tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[3.0] * 4, [3.0] * 4]
