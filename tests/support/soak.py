"""Updates, pauses and faults for as long as one likes, under requests that never stop.

``python -m tests.support.soak --minutes 60`` prints what was done and what came of it, as
a table and as JSON. What is done, and in which order, follows from ``--seed``. With
``--tokens`` and ``--commits`` it goes on until so many tokens were compared with their spans,
and so many versions went live; ``--streams 32`` gets there sooner. ``--on pp-size`` takes the first
server of the matrix that is named so (``tests/matrix``). Exit status 0 only if no request was
lost, no token had another version than its span says, and memory was flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from harness.server import PLAIN, Server, schedulers
from harness.trainer import Trainers, layout
from tests.matrix.configurations import CONFIGURATIONS, Configuration, named
from tests.support.load import (
    Generation,
    expect_spans,
    expect_whole,
    prompt,
    status,
    until,
    until_empty,
)
from tests.support.pool import CHUNK, MAX_RUNNING
from tests.support.updates import (
    Call,
    Sender,
    Weights,
    tensor_body,
    until_idle,
    until_staging,
)

VERSIONS = 6
STREAMS = 4
LENGTHS = (1, 40, 400, 1200)
MODES = ("in_place", "retract", "wait", "abort")
SOURCES = ("disk", "disk", "tensor", "tensor_bucket", "distributed")
LEASE_S = 0.3
# of a pause that waits for running requests
WAIT_S = 0.2
MIB = 1 << 20
# characters, where a soak fails
LOG_SHOWN = 20_000
# more than this share, and the memory is not flat
MOST_GROWTH = 0.03

LIVE = {"non_blocking": True}


@dataclass
class Numbers:
    """What a soak did. ``rss`` is the scheduler's memory in MiB, a minute after the other."""

    seed: int
    minutes: float = 0.0
    requests: int = 0
    lost_requests: int = 0
    tokens_checked: int = 0
    commits: int = 0
    refused_updates: int = 0
    updates: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rss: list[float] = field(default_factory=list)
    # what was wrong with each lost request
    losses: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the memory in the last three quarters, as a share of it.

        It grows at first: pages of the KV pool are touched one by one, and the allocator keeps
        what the largest of the prefills needed.
        """
        start = self.rss[len(self.rss) // 4]
        return self.rss[-1] / start - 1

    def as_json(self) -> dict[str, Any]:
        # dataclasses.asdict makes counters of counters' pairs
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


class Soak:
    """One caller that does one thing after another, while ``STREAMS`` requests run."""

    def __init__(
        self,
        server: Server,
        checkpoints: Path,
        sender: Sender,
        trainers: Trainers,
        seed: int,
        streams: int = STREAMS,
        configuration: Configuration = CONFIGURATIONS[0],
    ) -> None:
        self._server = server
        self._checkpoints = checkpoints
        self._sender = sender
        self._trainers = trainers
        self._choose = random.Random(seed)
        self._count_of_streams = streams
        self._configuration = configuration
        self._model = configuration.model
        self._streams: list[Generation] = []
        # those that an abort, or their client's going away, may have ended
        self._given_up: set[Generation] = set()
        self.numbers = Numbers(seed)
        self._operations: dict[Callable[[], None], int] = {
            self.update: 10,
            self.update_while_paused: 3,
            self.update_in_a_session: 3,
            self.roll_back: 2,
            self.pause: 4,
            self.abort_a_request: 2,
            self.leave_a_request: 2,
            self.kill_the_trainer: 1,
            self.leave_an_update: 2,
            self.send_garbage: 4,
            self.let_a_lease_run_out: 2,
            self.abandon_a_session: 2,
        }

    def run(self, minutes: float, *, tokens: int = 0, commits: int = 0) -> Numbers:
        """Until all three are reached.

        Raises ``AssertionError`` where the server is not as it must be at the end.
        """
        began = time.monotonic()
        for operation in self._operations:
            self._act(operation)
        operations, weights = zip(*self._operations.items(), strict=True)
        while (
            time.monotonic() < began + 60 * minutes
            or self.numbers.tokens_checked < tokens
            or self.numbers.commits < commits
        ):
            self._act(self._choose.choices(operations, weights)[0])
            if time.monotonic() >= began + 60 * len(self.numbers.rss):
                self.numbers.rss.append(round(self._rss()))
        self._finish()
        self.numbers.minutes = (time.monotonic() - began) / 60
        return self.numbers

    def _act(self, operation: Callable[[], None]) -> None:
        self._tend_streams()
        operation()

    # ---- requests ------------------------------------------------------------------

    def _tend_streams(self) -> None:
        for stream in [stream for stream in self._streams if stream.has_ended]:
            self._streams.remove(stream)
            self._check(stream)
        while len(self._streams) < self._count_of_streams:
            length = self._choose.choice(LENGTHS)
            asked = prompt(self._choose.choice((1, 16, 200)))
            in_chunks = self._choose.random() < 0.5
            self._streams.append(
                Generation(self._server, tokens=length, input_ids=asked, stream=in_chunks)
            )
            self.numbers.requests += 1

    def _check(self, stream: Generation) -> None:
        """Its tokens say which weights made them, and its spans must say the same."""
        gave_up = stream in self._given_up
        self._given_up.discard(stream)
        output = stream.heard()
        try:
            if output.tokens:
                expect_spans(output)
            if not gave_up:
                expect_whole(stream)
        except (AssertionError, OSError, ValueError) as error:
            self.numbers.lost_requests += 1
            self.numbers.losses.append(
                f"{stream.rid}: {len(output.tokens)} of {stream.max_new_tokens} tokens, {error!r}"
            )
        self.numbers.tokens_checked += len(output.tokens)

    def _give_up_all(self) -> None:
        self._given_up.update(self._streams)

    # ---- what callers do -----------------------------------------------------------

    def update(self) -> None:
        source = self._choose.choice(SOURCES)
        answer = self._send(source, kv_cache=self._choose.choice(("fence", "keep", "recompute")))
        self._count(source, answer)

    def update_while_paused(self) -> None:
        """As SGLang's own clients do it."""
        self._pause(self._choose.choice(("in_place", "retract")))
        self._count("disk while paused", self._send("disk"))
        self._post("/continue_generation", {})

    def update_in_a_session(self) -> None:
        version = self._choose.randrange(VERSIONS)
        weights = self._model.tensors(version)
        names = list(weights)
        cut = self._choose.randrange(1, len(names))
        # else an update that its caller left, and that comes only now, would be a piece of it
        named = {"session_id": self._post("/begin_weight_update", LIVE)["session_id"]}
        for part in (names[:cut], names[cut:]):
            body = self._tensor_body({name: weights[name] for name in part}, named)
            sent = self._server.post("/update_weights_from_tensor", body)
            if sent["status_code"] == 409:
                assert "did not name this session" in sent["message"], sent
                self.numbers.faults["stranger in a session"] += 1
                return
            assert sent["status_code"] == 200, sent
        body = {**LIVE, **named, "weight_version": f"v{version}", "kv_cache": "fence"}
        self._count("session", self._server.post("/end_weight_update", body))

    def roll_back(self) -> None:
        self._count("rollback", self._server.post("/inflight/rollback", {}))

    def pause(self) -> None:
        self._pause(self._choose.choice(MODES))
        self._post("/continue_generation", {})

    def abort_a_request(self) -> None:
        stream = self._choose.choice(self._streams)
        self._given_up.add(stream)
        stream.abort()

    # ---- what goes wrong -----------------------------------------------------------

    def leave_a_request(self) -> None:
        stream = self._choose.choice(self._streams)
        self._given_up.add(stream)
        stream.leave()
        self.numbers.faults["client left its stream"] += 1

    def kill_the_trainer(self) -> None:
        trainer = self._trainers.get()
        trainer.join(self._server, ranks=self._configuration.ranks)
        version = self._choose.randrange(VERSIONS)
        body = {**layout(version, self._model), **LIVE, "weight_version": f"v{version}"}
        call = Call(self._server, "/update_weights_from_distributed", body)
        sent = self._choose.randrange(1, 20)
        trainer.send(version, model=self._model, count=sent)
        until_staging(self._server, tensors=sent)
        trainer.close()
        answer = call.answer()
        assert answer["status_code"] == 400, answer
        self._post("/destroy_weights_update_group", {})
        self.numbers.faults["trainer killed in its broadcast"] += 1

    def leave_an_update(self) -> None:
        """It is done as a whole, or not at all."""
        version = self._choose.randrange(VERSIONS)
        body = {
            "model_path": str(self._checkpoints / f"v{version}"),
            "weight_version": f"v{version}",
            "kv_cache": "fence",
            **LIVE,
        }
        try:
            answer = self._server.post(
                "/update_weights_from_disk", body, timeout=self._choose.uniform(0.001, 0.2)
            )
        except httpx.TimeoutException:
            self.numbers.faults["caller left its update"] += 1
        else:
            self._count("disk", answer)
        until_idle(self._server)

    def send_garbage(self) -> None:
        path = self._choose.choice(
            (
                "/pause_generation",
                "/update_weights_from_disk",
                "/update_weights_from_tensor",
                "/update_weights_from_ipc",
                "/end_weight_update",
                "/inflight/rollback",
                "/resume_memory_occupation",
            )
        )
        garbage: Any = self._choose.choice(
            (
                self._choose.randbytes(40),
                b'{"mode": "moon"}',
                # what a route does not know it passes over: each has something for any of them
                b'{"mode": "moon", "model_path": "/nowhere", "non_blocking": true}',
                b'{"mode": "moon", "serialized_named_tensors": ["AAAA"], "non_blocking": true}',
                b'{"mode": "moon", "non_blocking": "maybe", "tags": ["moon"]}',
            )
        )
        answer = httpx.post(self._server.url + path, content=garbage, timeout=60, **PLAIN)
        assert 400 <= answer.status_code < 500, (path, garbage, answer.text)
        self.numbers.faults["garbage"] += 1

    def let_a_lease_run_out(self) -> None:
        body = {**self._pause_body(self._choose.choice(MODES)), "lease_s": LEASE_S}
        answer = self._server.post("/pause_generation", body)
        # on busy cores it may run out while requests still drain
        granted = answer["status_code"] == 200
        assert granted or "before it was granted" in answer["message"], answer
        until("the lease ran out", lambda: not status(self._server)["paused"])
        self.numbers.faults["lease of a pause ran out"] += 1

    def abandon_a_session(self) -> None:
        begun = self._post("/begin_weight_update", {**LIVE, "lease_s": LEASE_S})
        named = {"session_id": begun["session_id"]}
        weights = self._model.tensors(self._choose.randrange(VERSIONS))
        name = self._choose.choice(list(weights))
        body = self._tensor_body({name: weights[name]}, named)
        sent = self._server.post("/update_weights_from_tensor", body)
        # on busy cores the lease may run out before
        assert sent["status_code"] == 200 or "lease" in sent["message"], sent
        until_idle(self._server)
        self.numbers.faults["session abandoned"] += 1

    # ---- small things --------------------------------------------------------------

    def _send(self, source: str, **fields: Any) -> dict[str, Any]:
        version = self._choose.randrange(VERSIONS)
        name = f"v{version}"
        ranks = self._configuration.ranks
        return self._sender.send(
            self._server, source, version, ranks=ranks, weight_version=name, **LIVE, **fields
        )

    def _tensor_body(self, weights: Weights, named: dict[str, Any]) -> dict[str, Any]:
        return tensor_body(weights, ranks=self._configuration.ranks, **LIVE, **named)

    def _count(self, kind: str, answer: dict[str, Any]) -> None:
        self.numbers.updates[kind] += 1
        if answer["status_code"] == 200:
            self.numbers.commits += 1
        else:
            # only a rollback may find nothing to return to
            assert kind == "rollback", answer
            self.numbers.refused_updates += 1

    def _pause(self, mode: str) -> None:
        self._post("/pause_generation", self._pause_body(mode))
        self.numbers.pauses[mode] += 1

    def _pause_body(self, mode: str) -> dict[str, Any]:
        if mode == "abort":
            self._give_up_all()
        return {"mode": mode, **({"timeout_s": WAIT_S} if mode == "wait" else {})}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.post(path, body)
        assert answer["status_code"] == 200, (path, answer)
        return answer

    def _finish(self) -> None:
        for stream in self._streams:
            # it ends with the last word that is heard of it, whatever that is; the longest may
            # have all its tokens to go, on cores that others use too
            stream.wait_for_end(patience_s=600)
            self._check(stream)
        self._streams.clear()
        until_empty(self._server)
        until_idle(self._server)
        assert self._server.is_alive()

    def _rss(self) -> float:
        return sum(rank.memory_info().rss for rank in schedulers(self._server.process.pid)) / MIB


def show(numbers: Numbers) -> None:
    table = Table(title="soak", show_header=False)
    for name, value in numbers.as_json().items():
        if isinstance(value, dict):
            for kind, count in sorted(value.items()):
                table.add_row(f"{name}: {kind}", str(count))
        elif isinstance(value, float):
            table.add_row(name, f"{value:.1f}")
        elif name != "losses":
            table.add_row(name, str(value))
    Console().print(table)
    for loss in numbers.losses:
        print(loss)
    print(f"memory grew by {numbers.growth:.1%} after the first quarter")
    print(json.dumps(numbers.as_json()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--commits", type=int, default=0)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--on", type=named, default=CONFIGURATIONS[0], help="one rank")
    arguments = parser.parse_args()
    print(f"--seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Trainers()) as trainers:
        folder = Path(name)
        for version in range(VERSIONS):
            arguments.on.model.build(folder / f"v{version}", version)
        sender = Sender(folder, folder, trainers, arguments.on.model)
        most = str(max(MAX_RUNNING, arguments.streams))
        flags = ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", most)
        with arguments.on.serve(folder / "v0", folder, *flags) as server:
            soak = Soak(
                server, folder, sender, trainers,
                arguments.seed, arguments.streams, arguments.on,
            )  # fmt: skip
            try:
                numbers = soak.run(
                    arguments.minutes, tokens=arguments.tokens, commits=arguments.commits
                )
            except BaseException:
                # it goes with the folder
                print(server.log_text()[-LOG_SHOWN:])
                raise
    show(numbers)
    return 1 if numbers.lost_requests or numbers.growth > MOST_GROWTH else 0


if __name__ == "__main__":
    raise SystemExit(main())
