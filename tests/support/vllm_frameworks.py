"""What the RL clients that were written for vLLM ask of a server, call by call.

Read in their sources: SkyRL a956457 (``remote_inference_client.py``, ``broadcast_strategy.py``,
``worker_dispatch.py``), prime-rl 559b447 (``client.py``) and TRL's AsyncGRPO (``vllm_client.py``,
``weight_transfer.py``). They are data, so that a test plays each of them in every way.
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
from tests.support.vllm import update_info

Body = dict[str, Any]

# where the sender says nothing of it, and so larger than the marker
PACKED_BYTES = 1 << 30


@dataclass(frozen=True)
class Call:
    path: str
    body: Body | None = None
    query: Body | None = None
    # what its client looks for in the answer
    answer: Body | None = None


def rpc(method: str, arguments: Body | None = None) -> Call:
    body: Body = {"method": method}
    if arguments is not None:
        body["kwargs"] = arguments
    return Call("/collective_rpc", body, answer={"results": [None]})


@dataclass(frozen=True)
class Framework:
    """One way in which one framework updates."""

    pause: Call
    resume: Call
    # between the pause and the weights, and between the weights and the end of the pause
    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    # of SkyRL: the weights come by broadcast, between these two
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
    """Plays a framework's calls on a server, and reads of each answer what the client reads."""

    def __init__(
        self, server: Server, framework: Framework, checkpoints: Path, trainer: Trainer
    ) -> None:
        self._server = server
        self._framework = framework
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._http = httpx.Client(base_url=server.url, headers=server.headers, timeout=120, **PLAIN)

    def connect(self) -> None:
        """Ask how many ranks there are, and meet them, where weights come by broadcast."""
        if self._framework.start is None:
            # it goes on where there is none
            assert self._http.post("/init_broadcaster", json={}).status_code == 404
            return
        # a body with a GET, as it sends it
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
        """A piece that is refused in the middle; what the server says in its words."""
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
        """With a status that no client tries again, and a sentence where they look for it."""
        response = self._post(call)
        assert 400 <= response.status_code < 500, (call, response.text)
        message: str = response.json()["error"]["message"]
        return message

    def _in_a_directory(self, version: int) -> Call:
        path = str(self._checkpoints / f"v{version}")
        return Call("/update_weights", {"weight_dir": path}, answer={"status": "ok"})

    def _post(self, call: Call) -> httpx.Response:
        return self._http.post(call.path, json=call.body, params=call.query)
