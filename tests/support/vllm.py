"""Clients that were written for vLLM, and the server they meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.server import Server
from harness.trainer import Trainer, Trainers, layout
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.updates import drop_session

# so small that the marker model comes in several buckets
BUCKET_BYTES = 30_000

ROUTES = {
    "/pause": "POST",
    "/resume": "POST",
    "/abort_requests": "POST",
    "/init_weight_transfer_engine": "POST",
    "/shutdown_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/start_draft_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/weight_info": "GET",
    "/weight_checker": "POST",
    "/get_world_size": "GET",
    "/reset_prefix_cache": "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/release_kv_cache_memory": "POST",
}


class VLLMClient:
    """What a trainer that was written for vLLM has: its calls, in its words."""

    def __init__(self, server: Server) -> None:
        self._http = httpx.Client(base_url=server.url, headers=server.headers, timeout=120)

    def post(self, path: str, json: Any = None, **params: Any) -> Any:
        return self._read(self._http.post(path, json=json, params=params))

    def get(self, path: str, **params: Any) -> Any:
        return self._read(self._http.get(path, params=params))

    def refuse(
        self, path: str, *words: str, status: int = 400, json: Any = None, **params: Any
    ) -> None:
        """The call is refused, in a sentence that has ``words``."""
        response = self._http.request(ROUTES[path], path, json=json, params=params)
        assert response.status_code == status, response.text
        for word in words:
            assert word in response.json()["message"], response.text

    def init_weight_transfer_engine(self, trainer: Trainer, *, packed: bool) -> None:
        """Both sides meet: the server inside the call, the trainer beside it."""
        world_size = 1 + self.get("/get_world_size")["world_size"]
        init_info = {
            "master_address": "127.0.0.1",
            "master_port": trainer.listen(ranks=world_size - 1),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": packed,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": 2,
        }
        try:
            self.post("/init_weight_transfer_engine", {"init_info": init_info})
        except BaseException:
            # it waits for a server that does not come
            trainer.close()
            raise
        assert trainer.answer() == "joined"

    def shutdown_weight_transfer_engine(self, trainer: Trainer) -> None:
        trainer.order("leave", group="weight_update_group")
        self.post("/shutdown_weight_transfer_engine")
        assert trainer.answer() == "left"

    def send_weights(
        self, trainer: Trainer, version: int, *, packed: bool, name: str | None = None
    ) -> None:
        """A whole round: the call receives while the trainer broadcasts."""
        self.post("/start_weight_update")
        calling = threading.Thread(
            target=self.post, args=("/update_weights", {"update_info": update_info(version)})
        )
        calling.start()
        trainer.send(version, bucket=packed, bucket_bytes=BUCKET_BYTES if packed else None)
        assert trainer.answer() == "sent"
        calling.join()
        self.post("/finish_weight_update", None if name is None else {"weight_version": name})

    @staticmethod
    def _read(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()


def update_info(version: int) -> dict[str, Any]:
    fields = layout(version)
    return {
        "names": fields["names"],
        "dtype_names": fields["dtypes"],
        "shapes": fields["shapes"],
    }


@pytest.fixture
def vllm_server(pool: ServerPool) -> Iterator[Server]:
    """With vLLM's routes and an admin key."""
    server = pool.get(FLAVOURS["vllm_server"])
    yield server
    drop_session(server)
    pool.restore()


@pytest.fixture
def vllm(vllm_server: Server) -> VLLMClient:
    return VLLMClient(vllm_server)


@pytest.fixture
def trainer(vllm_server: Server, trainers: Trainers) -> Iterator[Trainer]:
    trainer = trainers.get()
    yield trainer
    # whichever of the two a failed test left in the group; the server first, because a
    # trainer that hangs in a broadcast then fails
    drop_session(vllm_server)
    vllm_server.post("/shutdown_weight_transfer_engine")
    trainer.reset()
