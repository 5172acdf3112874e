"""Rendezvous with a vLLM trainer, and a trainer that fails in it."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from torch._C._distributed_c10d import TCPStore

from harness.server import Server, for_the_answer, free_port
from harness.trainer import Trainer, Trainers
from tests.support.load import ENDLESS, expect_all_go_on, start_running, until
from tests.support.updates import expect_served, expect_to_run_on, serving
from tests.support.vllm import VLLMClient, update_info

pytest_plugins = ["tests.support.fixtures"]

UNIQUE_ID = "broadcast_from/0/0"


def init_info(port: int, world_size: int = 2) -> dict[str, Any]:
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": world_size,
    }


def groups(server: Server) -> dict[str, str]:
    found: dict[str, str] = server.get("/inflight/status")["staging"]["groups"]
    return found


def test_trainer_may_join_through_torch(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer
) -> None:
    """Some trainers join this server's own groups."""
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    vllm.init_weight_transfer_engine(trainer, packed=True, through_torch=True)
    vllm.send_weights(trainer, 1, packed=True, name="v1")
    expect_to_run_on(vllm_server, generations, [0, 1])
    vllm.shutdown_weight_transfer_engine(trainer)


class Runs:
    """An object that makes a call when unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._call = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def test_bad_nccl_id_is_refused_without_unpickling(
    vllm_server: Server, vllm: VLLMClient, tmp_path: Path
) -> None:
    """Any process can listen at that address and send any content."""
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    there = tmp_path / "it ran"
    for content in (pickle.dumps(Runs(os.mkdir, str(there))), pickle.dumps(ncclUniqueId())[:99]):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set(UNIQUE_ID, content)  # type: ignore[arg-type]
        vllm.refuse(
            "/init_weight_transfer_engine",
            "no pickled ncclUniqueId",
            json={"init_info": init_info(store.port)},
        )
        vllm.refuse("/start_weight_update", "init_weight_transfer_engine")
    assert not there.exists()
    expect_all_go_on(generations)


def test_trainer_dying_in_the_rendezvous_forms_no_group(
    vllm_server: Server, vllm: VLLMClient, trainers: Trainers
) -> None:
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    before = serving(vllm_server)
    trainer = trainers.get()
    # without a second rank, the trainer publishes no id
    info = init_info(trainer.listen(ranks=2, as_vllm=True), world_size=3)
    refused = threading.Thread(
        target=vllm.refuse,
        args=("/init_weight_transfer_engine", "weight_update_group", "not formed"),
        kwargs={"json": {"init_info": info}},
    )
    refused.start()
    # only a rank already connected to this trainer notices its death
    until("it waits for the id", lambda: "no NCCL id" in "".join(groups(vllm_server).values()))
    trainer.close()
    refused.join()
    assert not groups(vllm_server)
    assert serving(vllm_server) == before
    expect_all_go_on(generations)


def test_join_is_dropped_when_its_caller_leaves(
    vllm_server: Server, vllm: VLLMClient, trainers: Trainers
) -> None:
    url = vllm_server.url + "/init_weight_transfer_engine"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            url,
            json={"init_info": init_info(free_port())},
            headers=vllm_server.headers,
            timeout=for_the_answer(0.5),
        )
    until("it is given up", lambda: not groups(vllm_server))
    trainer = trainers.get()
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.shutdown_weight_transfer_engine(trainer)


def test_trainer_dying_in_a_broadcast_drops_the_update(
    vllm_server: Server, vllm: VLLMClient, trainers: Trainers
) -> None:
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    before = serving(vllm_server)
    trainer = trainers.get()
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.post("/start_weight_update")
    refused = threading.Thread(
        target=vllm.refuse,
        args=("/update_weights", "weight_update_group", "failed", "join anew"),
        kwargs={"json": {"update_info": update_info(1)}},
    )
    refused.start()
    trainer.send(1, count=10)
    assert trainer.answer() == "sent"
    trainer.close()
    refused.join()
    assert serving(vllm_server) == before
    expect_all_go_on(generations)
    # the next trainer replaces the broken group
    successor = trainers.get()
    vllm.init_weight_transfer_engine(successor, packed=False)
    vllm.send_weights(successor, 2, packed=False)
    expect_served(vllm_server, 2)
    vllm.shutdown_weight_transfer_engine(successor)
