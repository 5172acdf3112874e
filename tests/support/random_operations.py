"""Random operations at random times, and checks of each request's answer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.server import Server
from tests.support.load import (
    Generation,
    ask,
    expect_spans,
    expect_whole,
    pause,
    prompt,
    resume,
    start,
    status,
    until_empty,
    versions_of,
)
from tests.support.pool import MAX_QUEUED
from tests.support.soak_operations import any_kv_policy

SEED = int(os.environ.get("INFLIGHT_TEST_SEED", "20260915"))
MODES = ("in_place", "retract", "abort", "wait")
VERSIONS = 6
# longest drain of a ``wait`` pause
WAIT_S = 0.2


class Caller:
    """Performs random operations and checks their results."""

    def __init__(self, server: Server, checkpoints: Path, choose: random.Random) -> None:
        self._server = server
        self._checkpoints = checkpoints
        self._choose = choose
        self._shared_prompt = prompt(200)
        self.requests: list[Generation] = []
        # requests possibly ended by an abort
        self.may_be_aborted: set[Generation] = set()
        # versions that requests named
        self.pins: dict[Generation, str] = {}
        self.paused = False
        self.version = self.previous = 0
        self.epoch: int = status(server)["epoch"]
        self.operations: dict[Callable[[], None], int] = {
            self.begin_request: 8,
            self.begin_pinned: 4,
            self.pause: 4,
            self.resume: 4,
            self.update: 4,
            self.look: 2,
            self.abort_one: 1,
            self.abort_all: 1,
        }

    def act(self) -> None:
        operations, weights = zip(*self.operations.items(), strict=True)
        self._choose.choices(operations, weights)[0]()

    @property
    def open_requests(self) -> list[Generation]:
        return [request for request in self.requests if not request.has_ended]

    def begin_request(self) -> None:
        self._begin({})

    def begin_pinned(self) -> None:
        version = f"v{self._choose.choice([self.version, self.previous])}"
        before = len(self.requests)
        self._begin({"custom_params": {"weight_version": version}})
        self.pins |= dict.fromkeys(self.requests[before:], version)

    def _begin(self, sampling: dict[str, Any]) -> None:
        # a limited queue may refuse more requests
        if len(self.open_requests) >= MAX_QUEUED:
            return
        length = self._choose.choice([1, 16, 200])
        own = prompt(length)
        shares = self._choose.random() < 0.5
        self.requests += start(
            self._server,
            1,
            tokens=self._choose.choice([1, 8, 60]),
            input_ids=self._shared_prompt + own if shares else own,
            stream=self._choose.random() < 0.7,
            sampling=sampling,
        )

    def pause(self) -> None:
        mode = self._choose.choice(MODES)
        if mode == "abort":
            self.may_be_aborted.update(self.requests)
        answer = pause(self._server, mode, **({"timeout_s": WAIT_S} if mode == "wait" else {}))
        assert answer["paused"]
        self.paused = True

    def resume(self) -> None:
        assert resume(self._server)["paused"] is False
        self.paused = False

    def update(self) -> None:
        base = self.previous = self.version
        self.version = self._choose.randrange(VERSIONS)
        name = f"v{self.version}"
        body = {
            "model_path": str(self._checkpoints / name),
            "weight_version": name,
            "non_blocking": True,
            **any_kv_policy(self._choose),
        }
        receipt = ask(self._server, "POST", "/update_weights_from_disk", body)
        self.epoch += 1
        assert receipt["success"]
        assert receipt["base_version"] == f"v{base}"
        assert receipt["epoch"] == self.epoch

    def look(self) -> None:
        now = status(self._server)
        assert now["paused"] is self.paused
        assert now["weight_version"] == f"v{self.version}"
        # a request may have ended in the scheduler but not yet for its client
        assert now["running"] + now["waiting"] <= len(self.requests)

    def abort_one(self) -> None:
        if self.open_requests:
            self.abort(self._choose.choice(self.open_requests))

    def abort(self, request: Generation) -> None:
        self.may_be_aborted.add(request)
        self._server.post("/abort_request", {"rid": request.rid})

    def abort_all(self) -> None:
        self.may_be_aborted.update(self.requests)
        self._server.post("/abort_request", {"abort_all": True})


def is_lost(request: Generation) -> bool:
    """Return whether the version that a request without tokens names was lost."""
    request.wait_for_end()
    output = request.output_so_far()
    said = request.refusal or str(output.meta.get("finish_reason"))
    return not output.tokens and ("lost the weights" in said or "weight_version is" in said)


def act_at_random(server: Server, checkpoints: Path, operations: int) -> None:
    print(f"INFLIGHT_TEST_SEED={SEED}")
    caller = Caller(server, checkpoints, random.Random(SEED))
    for _ in range(operations):
        caller.act()
    caller.resume()

    for request in caller.requests:
        pin = caller.pins.get(request)
        if pin is not None and is_lost(request):
            continue
        output = request.output()
        expect_spans(output)
        if pin is not None:
            assert versions_of(output) == [pin]
            if "lost the weights" in str(output.meta["finish_reason"]):
                continue
        if output.finish_reason == "abort":
            assert request in caller.may_be_aborted
            assert len(output.tokens) <= request.max_new_tokens
        else:
            expect_whole(request)
    assert server.is_alive()
    until_empty(server)
    caller.look()
    (last,) = start(server, 1, tokens=8)
    assert set(expect_whole(last).tokens) == {100 + caller.version}
