"""Calls of RL clients written for vLLM, one by one.

Sources: SkyRL a956457 (``remote_inference_client.py``, ``broadcast_strategy.py``,
``worker_dispatch.py``), prime-rl 559b447 (``client.py``) and TRL's AsyncGRPO (``vllm_client.py``,
``weight_transfer.py``). The calls are data, so each test can run all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.server import PLAIN, Server
from harness.trainer import Trainer
from sglang_inflight.client.async_client import LIMITS
from tests.support.vllm import update_info

Body = dict[str, Any]

# the default of a sender without a setting, larger than the marker
PACKED_BYTES = 1 << 30


@dataclass(frozen=True)
class Call:
    path: str
    body: Body | None = None
    query: Body | None = None
    # fields read by the client
    answer: Body | None = None


def rpc(method: str, arguments: Body | None = None) -> Call:
    body: Body = {"method": method}
    if arguments is not None:
        body["kwargs"] = arguments
    return Call("/collective_rpc", body, answer={"results": [None]})


@dataclass(frozen=True)
class Framework:
    """One framework's way to update."""

    pause: Call
    resume: Call
    # calls between the pause and the weights, and between the weights and the resume
    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    # calls around a broadcast; None if weights come as a folder
    start: Call | None = None
    receive: Callable[[Body], Call] | None = None
    finish: Call | None = None


_PAUSE = Call("/pause", query={"mode": "keep", "clear_cache": "false"}, answer={"status": "paused"})
_RESUME = Call("/resume", answer={"status": "resumed"})
_SKYRL: dict[str, Any] = {
    "pause": _PAUSE,
    "resume": _RESUME,
    "start": rpc("skyrl_start_weight_update", {"is_checkpoint_format": True}),
    "receive": lambda info: rpc("update_weights_nccl", {"update_info": {**info, "packed": True}}),
    "finish": rpc("skyrl_finish_weight_update"),
}

FRAMEWORKS = {
    "skyrl": Framework(**_SKYRL),
    "skyrl-offload": Framework(
        **_SKYRL,
        before=(
            rpc("skyrl_sleep_for_weight_sync", {"offload_kv": True}),
            rpc("skyrl_wake_for_weight_sync", {"tags": ["weights"]}),
        ),
        after=(rpc("skyrl_wake_for_weight_sync", {"tags": ["kv_cache"]}),),
    ),
    "trl": Framework(
        pause=Call("/pause", query={"mode": "keep"}, answer={"status": "paused"}),
        resume=_RESUME,
        start=Call("/start_weight_update", {"is_checkpoint_format": True}),
        receive=lambda info: Call(
            "/update_weights",
            {"update_info": {**info, "packed": True, "is_checkpoint_format": True}},
        ),
        finish=Call("/finish_weight_update"),
    ),
    "prime-rl": Framework(pause=_PAUSE, resume=_RESUME),
}


class Client:
    """A framework's client, which checks the fields its original reads."""

    def __init__(
        self, server: Server, framework: Framework, checkpoints: Path, trainer: Trainer
    ) -> None:
        self._server = server
        self._framework = framework
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._http = httpx.Client(
            base_url=server.url,
            headers=server.headers,
            timeout=120,
            limits=LIMITS,
            **PLAIN,
        )

    def connect(self) -> None:
        """Ask for the number of ranks, and join a group with them, for sources with broadcasts."""
        if self._framework.start is None:
            # this client continues without a broadcaster
            assert self._http.post("/init_broadcaster", json={}).status_code == 404
            return
        # a GET with a body, like this client's
        answer = self._http.request("GET", "/get_world_size", json={})
        ranks = answer.json()["world_size"]
        init_info = {
            "master_address": "127.0.0.1",
            "master_port": self._trainer.listen(ranks=ranks, as_vllm=True),
            "rank_offset": 1,
            "world_size": 1 + ranks,
        }
        self.expect(Call("/init_weight_transfer_engine", {"init_info": init_info}))
        assert self._trainer.answer() == "joined"

    def pause(self) -> None:
        for call in (self._framework.pause, *self._framework.before):
            self.expect(call)

    def send(self, version: int) -> None:
        framework = self._framework
        if framework.start is None:
            self.expect(self._in_a_directory(version))
            return
        assert framework.receive is not None
        assert framework.finish is not None
        self.expect(framework.start)
        receiving = threading.Thread(
            target=self.expect, args=(framework.receive(update_info(version)),)
        )
        receiving.start()
        self._trainer.send(version, bucket=True, bucket_bytes=PACKED_BYTES)
        assert self._trainer.answer() == "sent"
        receiving.join()
        self.expect(framework.finish)

    def fail(self) -> str:
        """Send a piece that is refused in the middle, and return the server's error."""
        framework = self._framework
        if framework.start is None:
            return self.refuse(self._in_a_directory(99))
        assert framework.receive is not None
        assert framework.finish is not None
        self.expect(framework.start)
        info = update_info(1)
        info["names"][3] = "nonsense"
        self._trainer.send(1, bucket=True, bucket_bytes=PACKED_BYTES)
        sentence = self.refuse(framework.receive(info))
        assert self._trainer.answer() == "sent"
        assert "no weight update" in self.refuse(framework.finish)
        return sentence

    def resume(self) -> None:
        for call in (*self._framework.after, self._framework.resume):
            self.expect(call)

    def expect(self, call: Call) -> None:
        response = self._post(call)
        assert response.status_code == 200, (call, response.text)
        said = response.json()
        for name, value in (call.answer or {}).items():
            assert said[name] == value, (call, said)

    def refuse(self, call: Call) -> str:
        """Check for a status that no client retries, and return the error's message."""
        response = self._post(call)
        assert 400 <= response.status_code < 500, (call, response.text)
        message: str = response.json()["error"]["message"]
        return message

    def _in_a_directory(self, version: int) -> Call:
        path = str(self._checkpoints / f"v{version}")
        return Call("/update_weights", {"weight_dir": path}, answer={"status": "ok"})

    def _post(self, call: Call) -> httpx.Response:
        return self._http.post(call.path, json=call.body, params=call.query)
