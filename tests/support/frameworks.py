"""Calls of the RL frameworks' own clients, one by one.

Sources: slime 624b824 (``sglang_engine.py``, ``update_weight_from_*.py``), miles 31f1ca9 (the same,
``mixin.py``), AReaL 4aef98d and cbff54d (``sglang_remote.py``, ``fsdp_engine.py``), verl b178a3c
and 1dda039 (``http_server_engine.py``, ``sglang_rollout.py``), NeMo-RL 3ecf72e
(``sglang_weight_synchronizer.py``) and 7ea279a (``sglang_worker.py``, ``policy/utils.py``),
TorchRL ae9719f (``sglang_nccl.py``), xtuner b934f46 (``rollout/sglang.py``,
``weight_update/transport.py``). The calls are data, so each test can run all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import marker
from harness.server import PLAIN, Server
from harness.trainer import FLATTENED_BUCKET, Trainer, Trainers, layout
from tests.support.updates import by_reference, flatten

Body = dict[str, Any]


@dataclass(frozen=True)
class Framework:
    """One framework's way to update. Bodies have exactly the framework's fields."""

    source: str
    pause: Body
    # whether it aborts all requests before the pause
    aborts_first: bool = False
    # a second pause, right after the first
    then_pause: Body | None = None
    # whether it repeats the flush until granted, between the pause and the first piece
    flushes: bool = True
    # whether it asks for the load until no request runs, between the pause and the first piece
    awaits_no_load: bool = False
    # whether it releases all memory, and takes back the weights' before the first piece
    releases: bool = False
    begin: Body | None = None
    pieces: int = 2
    # whether a broadcast is one bucket
    is_bucket: bool = False
    piece: Body = field(default_factory=dict)
    resume: Body = field(default_factory=dict)
    # where the version's name is sent: with each piece, by a call of its own, or never
    names: str | None = None
    group: str = "weight_update_group"
    # additional fields of the join, and the form of its port
    join: Body = field(default_factory=dict)
    port: Callable[[int], int | str] = int
    destroys_first: bool = False

    @property
    def aborts_waiting_requests(self) -> bool:
        """True if an update also aborts requests accepted during the pause."""
        return bool(self.piece.get("abort_all_requests"))

    @property
    def mode(self) -> str:
        """The pause's mode, which decides about running requests."""
        mode: str = self.pause.get("mode", "abort")
        return mode


_SLIME: dict[str, Any] = {"pause": {}, "names": "piece"}
_MILES: dict[str, Any] = {"begin": {"selector": "all"}, "names": "call", "destroys_first": True}
_BUCKET: Body = {"load_format": FLATTENED_BUCKET, "flush_cache": False}
# begin_weight_update's body was not read: "all" is its only field's default
_NEMO: dict[str, Any] = {"pause": {"mode": "retract"}, "begin": {}, "names": "piece"}
# its group has another name for each attempt
_TORCHRL: dict[str, Any] = {
    "flushes": False,
    "awaits_no_load": True,
    "pieces": 1,
    "group": "weight_update_group_1f2e3d4c",
    "resume": {"torch_empty_cache": True},
}
_XTUNER: dict[str, Any] = {"pause": {"mode": "abort"}, "aborts_first": True}
_TWO_PAUSES: dict[str, Any] = {"pause": {}, "then_pause": {"mode": "in_place"}, "flushes": False}

FRAMEWORKS = {
    "slime-disk": Framework("disk", **_SLIME),
    "slime-tensor": Framework("tensor", piece=_BUCKET, **_SLIME),
    "slime-distributed": Framework(
        "distributed", piece={"flush_cache": False}, group="slime-pp_0", **_SLIME
    ),
    "miles-disk": Framework("disk", {"mode": "retract"}, names="piece"),
    "miles-tensor": Framework(
        "tensor", {"mode": "retract"}, piece={**_BUCKET, "selector": "all"}, **_MILES
    ),
    "miles-distributed": Framework(
        "distributed",
        {"mode": "in_place"},
        flushes=False,
        piece={"flush_cache": False, "selector": "all"},
        group="miles-pp_0",
        **_MILES,
    ),
    "verl-tensor": Framework("tensor", {"mode": "abort"}, piece=_BUCKET),
    "areal-disk": Framework("disk", {}, flushes=False, piece={"abort_all_requests": True}),
    "areal-distributed": Framework(
        "distributed",
        {},
        flushes=False,
        piece={"abort_all_requests": True},
        group="update_weight_group_0",
        join={"pp_rank": 0},
        port=str,
    ),
    "areal-disk-two-pauses": Framework("disk", piece={"abort_all_requests": True}, **_TWO_PAUSES),
    "areal-distributed-two-pauses": Framework(
        "distributed",
        piece={"abort_all_requests": True},
        group="update_weight_group_0",
        port=str,
        **_TWO_PAUSES,
    ),
    "nemo-tensor": Framework("tensor", piece=_BUCKET, **_NEMO),
    "nemo-distributed": Framework("distributed", piece={"flush_cache": False}, **_NEMO),
}

# They end all requests, wait for their end, or release memory: no request runs on in flight.
ONLY_WITH_PAUSES = {
    "torchrl-abort": Framework(
        "distributed",
        {"mode": "abort"},
        piece={"flush_cache": True, "abort_all_requests": False},
        **_TORCHRL,
    ),
    "torchrl-retract": Framework(
        "distributed",
        {"mode": "retract"},
        piece={"flush_cache": False, "abort_all_requests": False},
        **_TORCHRL,
    ),
    "xtuner-tensor": Framework("tensor", piece=_BUCKET, **_XTUNER),
    "xtuner-distributed": Framework(
        "distributed",
        pieces=1,
        is_bucket=True,
        piece={"load_format": FLATTENED_BUCKET},
        group="xtuner_NCCL_weight_update_0",
        **_XTUNER,
    ),
    "xtuner-tensor-colocated": Framework("tensor", piece=_BUCKET, releases=True, **_XTUNER),
}


class Client:
    """A framework's client, which requires a 200 for each call."""

    def __init__(
        self, server: Server, framework: Framework, checkpoints: Path, trainers: Trainers
    ) -> None:
        self._server = server
        self._framework = framework
        self._checkpoints = checkpoints
        self._trainers = trainers

    @contextlib.contextmanager
    def connected(self) -> Iterator[Client]:
        """Join a group with the ranks during the block, for sources with broadcasts."""
        framework = self._framework
        if framework.source != "distributed":
            yield self
            return
        trainer = self._trainers.get()
        group = {"group_name": framework.group}
        if framework.destroys_first:
            self._server.post("/destroy_weights_update_group", group)
        port = trainer.listen(group=framework.group)
        self._expect(
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": framework.port(port),
                "rank_offset": 1,
                "world_size": 2,
                "backend": "gloo",
                **group,
                **framework.join,
            },
        )
        assert trainer.answer() == "joined"
        try:
            yield self
        finally:
            if trainer.is_alive:
                trainer.leave(self._server, group=framework.group)

    def pause(self) -> dict[str, Any]:
        framework = self._framework
        if framework.aborts_first:
            self._expect("/abort_request", {"abort_all": True})
        answer = self._expect("/pause_generation", framework.pause)
        if framework.then_pause is not None:
            answer = self._expect("/pause_generation", framework.then_pause)
        if framework.flushes:
            # they ask up to sixty times, once a second, and then raise
            response = httpx.get(self._server.url + "/flush_cache", timeout=60, **PLAIN)
            assert response.status_code == 200, response.text
        if framework.awaits_no_load:
            # its own path, /get_load, is gone since before SGLang 0.5.23
            loads = self._server.get("/v1/loads")["loads"]
            assert sum(load["num_running_reqs"] for load in loads) == 0, loads
        if framework.releases:
            self._expect("/release_memory_occupation", {})
            self._expect("/resume_memory_occupation", {"tags": ["weights"]})
        return answer

    def begin(self) -> None:
        if self._framework.begin is not None:
            answer = self._expect("/begin_weight_update", self._framework.begin)
            assert answer["success"] is True, answer

    def send(self, version: int, name: str) -> None:
        """Send all pieces and require each to be accepted."""
        with self.sending(version, name) as pieces:
            for piece in pieces:
                answer = piece()
                assert (answer["status_code"], answer["success"]) == (200, True), answer

    @contextlib.contextmanager
    def sending(self, version: int, name: str) -> Iterator[list[Callable[[], dict[str, Any]]]]:
        """Yield the calls of the pieces, to be made in order. The caller reads the answers."""
        trainer: Trainer | None = None
        if self._framework.source == "distributed":
            trainer = self._trainers.get()
            trainer.send(version, group=self._framework.group, bucket=self._framework.is_bucket)
        yield [self.piece(body, name) for body in self.bodies(version)]
        if trainer is not None and trainer.is_alive:
            assert trainer.answer() == "sent"

    def finish(self, name: str) -> dict[str, Any]:
        """End the update, and return the answer of ``continue_generation``."""
        if self._framework.names == "call":
            body = {"new_version": name, "abort_all_requests": False}
            assert self._expect("/update_weight_version", body)["success"] is True
        if self._framework.begin is not None:
            self._expect("/end_weight_update", {})
        if self._framework.releases:
            # xtuner asks for the KV cache alone, which leaves the graphs away
            self._expect("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        return self.resume()

    def resume(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.post("/continue_generation", self._framework.resume)
        return answer

    def piece(self, body: Body, name: str) -> Callable[[], dict[str, Any]]:
        """Return a function that sends one of ``bodies``."""
        named = {"weight_version": name} if self._framework.names == "piece" else {}
        path = f"/update_weights_from_{self._framework.source}"
        return lambda: self._server.post(path, {**body, **self._framework.piece, **named})

    def bodies(self, version: int) -> list[Body]:
        """Return the pieces' bodies, without the framework's further fields."""
        weights = list(marker.tensors(version).items())
        each = -(-len(weights) // self._framework.pieces)
        parts = [slice(at, at + each) for at in range(0, len(weights), each)]
        if self._framework.source == "disk":
            return [{"model_path": str(self._checkpoints / f"v{version}")}]
        if self._framework.source == "tensor":
            return [
                {"serialized_named_tensors": [by_reference(flatten(dict(weights[part])))]}
                for part in parts
            ]
        whole = layout(version)
        return [
            {
                **{key: values[part] for key, values in whole.items()},
                "group_name": self._framework.group,
            }
            for part in parts
        ]

    def _expect(self, path: str, body: Body) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.post(path, body)
        assert answer["status_code"] == 200, (path, answer)
        return answer
