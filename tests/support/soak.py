"""Updates, pauses and faults for any length of time, under constant requests.

``python -m tests.support.soak --minutes 60`` prints the operations and their results, as a table
and as JSON. ``--seed`` determines the operations and their order. ``--tokens`` and ``--commits``
are goals for checked tokens and committed versions, soonest reached with ``--streams 32``. ``--on
pp-size`` takes the first server of the matrix with that name (``tests/matrix``). The exit status is
0 only without lost requests, with exact spans, and with flat memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    Output,
    expect_spans,
    expect_whole,
    prompt,
    status,
    until,
    until_empty,
)
from tests.support.pool import CHUNK, MAX_RUNNING
from tests.support.soak_operations import LORA_FLAGS, Changes, Loras, Saves, any_kv_policy
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
# lease of a pause ended by its caller
LONG_LEASE_S = 300.0
KINDS = ("kv_cache", "weights", "cuda_graph")
# longest drain of a ``wait`` pause
WAIT_S = 0.2
MIB = 1 << 20
# characters of the log, after a failure
LOG_SHOWN = 20_000
# share of growth up to which memory counts as flat
MOST_GROWTH = 0.03

KV_TOKENS_PER_STEP = 64

LIVE = {"non_blocking": True}


@dataclass
class Numbers:
    """Results of a soak. ``rss`` is the scheduler's memory in MiB, one value a minute."""

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
    # requests with an adapter, a pin or a grammar, and their tokens
    kinds: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)
    rss: list[float] = field(default_factory=list)
    # the error of each lost request
    losses: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Growth of memory in the last three quarters, as a share.

        Memory grows at first: pages of the KV pool are touched one by one, and the allocator keeps
        the room of the largest prefill.
        """
        start = self.rss[len(self.rss) // 4]
        return self.rss[-1] / start - 1

    def as_json(self) -> dict[str, Any]:
        # dataclasses.asdict would make counters of each counter's pairs
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


class Soak:
    """One caller making one call after another, while ``STREAMS`` requests run."""

    def __init__(
        self,
        server: Server,
        checkpoints: Path,
        sender: Sender,
        trainers: Trainers,
        seed: int,
        streams: int = STREAMS,
        configuration: Configuration = CONFIGURATIONS[0],
        *,
        transparent: bool = False,
        is_soft: bool = False,
    ) -> None:
        """``transparent``: the server treats pauses without our fields as windows."""
        self._server = server
        self._checkpoints = checkpoints
        self._sender = sender
        self._trainers = trainers
        self._choose = random.Random(seed)
        self._count_of_streams = streams
        self._configuration = configuration
        self._model = configuration.model
        self._streams: list[Generation] = []
        # requests possibly ended by an abort, or by their client's disconnect
        self._given_up: set[Generation] = set()
        # requests with a grammar: their tokens do not show their weights
        self._unshown: set[Generation] = set()
        # requests that name their weights
        self._pinned: set[Generation] = set()
        # requests with a bound on the age of their KV
        self._bounds: dict[Generation, int] = {}
        # the adapter of each request with one
        self._adapters: dict[Generation, str] = {}
        self._kinds = {
            "grammar": self._unshown, "pinned": self._pinned, "adapter": self._adapters,
            "bounded": self._bounds,
        }  # fmt: skip
        self._loras: Loras | None = None
        self.numbers = Numbers(seed)
        self._transparent = transparent
        # whether requests with too old KV go on with it until it is recomputed
        self._is_soft = is_soft
        self._bounds_kv = status(server)["capabilities"]["kv_max_age"] is None
        # without a memory saver nothing is released, and all else is the same
        self._has_saver = server.get("/server_info")["enable_memory_saver"]
        # some names are prefixes of others
        self._names = itertools.count()
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
            self.abort_an_unknown_name: 2,
            self.rename: 3,
            self.leave_a_call: 6,
            self.lose_a_piece: 2,
        }
        if configuration is CONFIGURATIONS[0]:
            self._operations |= {self.release_memory: 3, self.overwrite_the_weights: 1}
            folder = Path(tempfile.mkdtemp(dir=checkpoints))
            few = Changes(
                server, self._choose, self._model, VERSIONS, trainers, folder, self.numbers.updates
            )
            self._saves = Saves(server, self._choose, checkpoints, folder)
            self.numbers.saves = self._saves.counts
            self._operations |= few.operations() | self._saves.operations()
            if server.get("/server_info")["enable_lora"]:
                self._loras = Loras(server, self._choose, folder)
                self.numbers.adapters = self._loras.counts
                self._operations |= self._loras.operations()
        if transparent:
            self._operations |= {self.update_in_a_window: 10, self.lose_a_piece_of_a_window: 3}

    def run(self, minutes: float, *, tokens: int = 0, commits: int = 0) -> Numbers:
        """Run until all three goals are reached.

        Raise ``AssertionError`` if the server is not well at the end.
        """
        began = time.monotonic()
        for operation in self._operations:
            self._act(operation)
        # on a slow machine the round may have taken all the minutes
        self.numbers.rss.append(round(self._rss()))
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
            sampling, fields = self._kind_of_request()
            custom = {} if sampling else self._custom_params()
            stream = Generation(
                self._server,
                tokens=length,
                input_ids=asked,
                stream=in_chunks,
                rid=f"soak{next(self._names)}",
                sampling=sampling or {"custom_params": custom},
                **fields,
            )
            self._streams.append(stream)
            if "kv_max_age" in custom:
                self._bounds[stream] = custom["kv_max_age"]
            if sampling:
                # ended by the second commit after its version's, or refused by then
                self._given_up.add(stream)
            if "regex" in sampling:
                self._unshown.add(stream)
            elif sampling:
                self._pinned.add(stream)
            if "lora_path" in fields:
                self._adapters[stream] = fields["lora_path"]
            self.numbers.requests += 1

    def _kind_of_request(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return sampling parameters and further fields: an adapter, a pin, a grammar."""
        fields: dict[str, Any] = {}
        if self._loras is not None and self._loras.loaded and self._choose.random() < 0.4:
            fields["lora_path"] = self._choose.choice(sorted(self._loras.loaded))
        if self._choose.random() < 0.6:
            return {}, fields
        sampling: dict[str, Any] = {}
        if self._choose.random() < 0.7:
            now = status(self._server)
            served, previous = now["weight_version"], now["previous_version"]
            version = self._choose.choice((served, served, served, previous or served))
            sampling["custom_params"] = {"weight_version": version}
        if not sampling or self._choose.random() < 0.5:
            # a new one each time, because it takes a while to compile
            sampling["regex"] = "[a-z]{20,30}" + str(self._choose.randrange(10**6))
        return sampling, fields

    def _custom_params(self) -> dict[str, Any]:
        """Return a bound on the age of a request's KV, and a lease on it, or neither."""
        custom: dict[str, Any] = {}
        if self._bounds_kv and self._choose.random() < 0.4:
            custom["kv_max_age"] = self._choose.randrange(3)
        if self._bounds_kv and self._choose.random() < 0.3:
            custom["kv_lease_s"] = self._choose.choice((0.5, 60))
        return custom

    def _check(self, stream: Generation) -> None:
        """Check the spans against the tokens, which show their weights."""
        gave_up = stream in self._given_up
        shows = stream not in self._unshown
        self._given_up.discard(stream)
        output = stream.output_so_far()
        try:
            if output.tokens and shows:
                expect_spans(output)
            if not gave_up:
                expect_whole(stream)
            if stream in self._pinned:
                assert len({*output.tokens}) <= 1, "a pinned request has tokens of two versions"
            if (most := self._bounds.get(stream)) is not None and not self._is_soft:
                expect_young(output, most)
            adapter = self._adapters.get(stream)
            if adapter is not None and output.tokens:
                named = {span["adapter"] for span in output.meta["adapter_versions"]}
                assert named == {adapter}, f"of adapter {adapter!r}: {output.meta}"
        except (AssertionError, OSError, ValueError) as error:
            self.numbers.lost_requests += 1
            self.numbers.losses.append(
                f"{stream.rid}: {len(output.tokens)} of {stream.max_new_tokens} tokens, {error!r}"
            )
        for kind, streams in self._kinds.items():
            if stream in streams:
                self.numbers.kinds[kind] += 1
                self.numbers.kinds[f"tokens, {kind}"] += len(output.tokens)
        self._pinned.discard(stream)
        self._unshown.discard(stream)
        self._adapters.pop(stream, None)
        self._bounds.pop(stream, None)
        self.numbers.tokens_checked += len(output.tokens)

    def _give_up_all(self) -> None:
        self._given_up.update(self._streams)

    # ---- what callers do -----------------------------------------------------------

    def update(self) -> None:
        source = self._choose.choice(SOURCES)
        answer = self._send(source, **any_kv_policy(self._choose))
        self._count(source, answer)

    def update_while_paused(self) -> None:
        """Update during a real pause, like SGLang's own clients."""
        self._pause(self._choose.choice(("in_place", "retract")))
        self._count("disk while paused", self._send("disk"))
        self._post("/continue_generation", {})

    def update_in_a_session(self) -> None:
        version = self._choose.randrange(VERSIONS)
        weights = self._model.tensors(version)
        names = list(weights)
        cut = self._choose.randrange(1, len(names))
        # the id keeps out a late unnamed update, which would become a piece
        named = {"session_id": self._post("/begin_weight_update", LIVE)["session_id"]}
        for part in (names[:cut], names[cut:]):
            body = self._tensor_body({name: weights[name] for name in part}, named)
            sent = self._server.post("/update_weights_from_tensor", body)
            if sent["status_code"] == 409:
                assert "without a session_id has sent" in sent["message"], sent
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

    def abort_an_unknown_name(self) -> None:
        """Abort a prefix of all names, which is no request's name."""
        answer = self._server.post("/abort_request", {"rid": "soak"})
        assert answer["status_code"] == 200, answer

    def rename(self) -> None:
        """Rename the version. The tokens show that the weights are the same."""
        name = f"{self._version}+{next(self._names)}"
        self._post("/update_weight_version", {"new_version": name, "abort_all_requests": False})
        self._expect_name(name)
        self.numbers.updates["rename"] += 1

    @property
    def _version(self) -> str:
        name: str = status(self._server)["weight_version"]
        return name.partition("+")[0]

    def _expect_name(self, name: str) -> None:
        """Check the version's name at every route."""
        for path in ("/get_weight_version", "/model_info", "/inflight/status"):
            assert self._server.get(path)["weight_version"] == name, path

    def release_memory(self) -> None:
        """Release some kinds of memory, and resume them in another order."""
        self._pause("retract")
        kinds = self._choose.sample(KINDS, self._choose.randrange(1, len(KINDS) + 1))
        keep = self._choose.choice(("host", "discard"))
        for kind in kinds:
            self._post("/release_memory_occupation", {"tags": [kind], "keep_weights": keep})
        self._refuse("/release_memory_occupation", {"tags": [self._choose.choice(kinds)]})
        if "weights" in kinds:
            self._refuse("/inflight/rollback", {})
        for kind in self._choose.sample(kinds, len(kinds)):
            # earlier holders are released; memory's own pause keeps requests waiting
            self._post("/resume_memory_occupation", {"tags": [kind]})
        is_hollow = status(self._server)["memory"]["hollow"] is not None
        assert is_hollow == (self._has_saver and "weights" in kinds and keep == "discard")
        if is_hollow:
            self._count("disk into hollow weights", self._send("disk"))
        self._post("/continue_generation", {})
        self.numbers.pauses["memory away"] += 1

    def overwrite_the_weights(self) -> None:
        """Overwrite the weights with noise, served only after a whole update."""
        self._pause("retract")
        self._post("/weights_checker", {"action": "reset_tensors"})
        assert self._server.get("/ready")["status_code"] == 503
        self._refuse("/inflight/rollback", {}, status_code=400)
        self._count("disk over noise", self._send("disk"))
        self._post("/continue_generation", {})
        self.numbers.faults["weights overwritten"] += 1

    def update_in_a_window(self) -> None:
        """Update in a transparent window, like SGLang's own clients."""
        version = self._choose.randrange(VERSIONS)
        self._open_window()
        for body in self._pieces(version):
            assert self._server.post("/update_weights_from_tensor", body)["status_code"] == 200
        while self._choose.random() < 0.5:
            self._leaves("/continue_generation", {})
        answer = self._server.post("/continue_generation", {})
        self._count("window", answer)
        assert answer["receipt"]["weight_version"] == f"v{version}", answer

    def _open_window(self) -> None:
        mode = self._choose.choice(("in_place", "retract"))
        assert self._post("/pause_generation", {"mode": mode})["transparent"]
        if self._choose.random() < 0.5:
            self._post("/begin_weight_update", {})

    def _pieces(self, version: int) -> list[dict[str, Any]]:
        weights = self._model.tensors(version)
        names = list(weights)
        cut = self._choose.randrange(1, len(names))
        named = {"weight_version": f"v{version}"}
        return [
            tensor_body(
                {name: weights[name] for name in part}, ranks=self._configuration.ranks, **named
            )
            for part in (names[:cut], names[cut:])
        ]

    # ---- what goes wrong -----------------------------------------------------------

    def leave_a_request(self) -> None:
        stream = self._choose.choice(self._streams)
        self._given_up.add(stream)
        stream.disconnect()
        self.numbers.faults["client left its stream"] += 1

    def kill_the_trainer(self) -> None:
        trainer = self._trainers.get()
        trainer.join(self._server, ranks=self._configuration.ranks)
        version = self._choose.randrange(VERSIONS)
        body = {**layout(version, self._model), **LIVE, "weight_version": f"v{version}"}
        call = Call(self._server, "/update_weights_from_distributed", body)
        sent = self._choose.randrange(1, len(body["names"]))
        trainer.send(version, model=self._model, count=sent)
        until_staging(self._server, tensors=sent)
        trainer.close()
        answer = call.answer()
        assert answer["status_code"] == 400, answer
        self._post("/destroy_weights_update_group", {})
        self.numbers.faults["trainer killed in its broadcast"] += 1

    def leave_an_update(self) -> None:
        """Leave an update in the middle: it is done as a whole, or not at all."""
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
                # routes ignore unknown fields, so each body has a bad field for every route
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
        # on busy cores the lease may end during the drain
        granted = answer["status_code"] == 200
        assert granted or "before it was granted" in answer["message"], answer
        until("the lease ran out", lambda: not status(self._server)["paused"])
        self.numbers.faults["lease of a pause ran out"] += 1

    def leave_a_call(self) -> None:
        """Leave a call: afterwards no holder without an owner is left, and all routes agree on the
        version.
        """
        pause_id = f"pause{next(self._names)}"
        pause = {"mode": self._choose.choice(("in_place", "retract")), "new_id": pause_id}
        name = f"{self._version}+{next(self._names)}"
        renames = {"new_version": name, "abort_all_requests": False}
        path, body = self._choose.choice(
            (
                ("/pause_generation", {**pause, "lease_s": LEASE_S}),
                ("/begin_weight_update", {**LIVE, "lease_s": LEASE_S}),
                ("/update_weight_version", renames),
                ("/inflight/rollback", {}),
                ("/abort_weight_update", {}),
                ("/continue_generation", {}),
            )
        )
        self._leaves(path, body)
        # the lease ends a pause or a session without an owner
        until("nothing is paused", lambda: not status(self._server)["paused"])
        until_idle(self._server)
        until("the name is the ranks'", self._is_named_as_the_ranks_say)

    def _is_named_as_the_ranks_say(self) -> bool:
        says: str = self._server.get("/get_weight_version")["weight_version"]
        return says == status(self._server)["weight_version"]

    def _leaves(self, path: str, body: dict[str, Any]) -> None:
        """Call, and leave after a while, with or without the answer."""
        try:
            self._server.post(path, body, timeout=self._choose.uniform(0.0005, 0.03))
        except httpx.TimeoutException:
            self.numbers.faults[f"caller left {path}"] += 1

    def lose_a_piece(self) -> None:
        """Lose a piece of a session in SGLang's form, whose client ends the session anyway."""
        before = status(self._server)["epoch"]
        self._post("/begin_weight_update", {})
        version = self._choose.randrange(VERSIONS)
        first, second = self._pieces(version)
        sent = self._server.post("/update_weights_from_tensor", first)
        assert sent["status_code"] == 200, sent
        self._send_garbage("/update_weights_from_tensor")
        self._refuse("/update_weights_from_tensor", second, status_code=400)
        self._refuse("/end_weight_update", {}, status_code=400)
        assert status(self._server)["epoch"] == before
        self.numbers.faults["piece lost"] += 1

    def lose_a_piece_of_a_window(self) -> None:
        before = status(self._server)["epoch"]
        self._open_window()
        first, second = self._pieces(self._choose.randrange(VERSIONS))
        sent = self._server.post("/update_weights_from_tensor", first)
        assert sent["status_code"] == 200, sent
        if self._choose.random() < 0.5:
            self._send_garbage("/update_weights_from_tensor")
        else:
            self._server.post("/abort_weight_update", {})
        self._refuse("/update_weights_from_tensor", second, status_code=400)
        self._refuse("/continue_generation", {}, status_code=400)
        # the first call reports the loss, the next one works
        self._post("/continue_generation", {})
        assert status(self._server)["epoch"] == before
        self.numbers.faults["piece of a window lost"] += 1

    def _send_garbage(self, path: str) -> None:
        answer = httpx.post(self._server.url + path, content=b"{", timeout=60, **PLAIN)
        assert answer.status_code == 400, answer.text

    def _refuse(self, path: str, body: dict[str, Any], *, status_code: int = 409) -> None:
        answer = self._server.post(path, body)
        assert answer["status_code"] == status_code, (path, body, answer)

    def abandon_a_session(self) -> None:
        begun = self._post("/begin_weight_update", {**LIVE, "lease_s": LEASE_S})
        named = {"session_id": begun["session_id"]}
        weights = self._model.tensors(self._choose.randrange(VERSIONS))
        name = self._choose.choice(list(weights))
        body = self._tensor_body({name: weights[name]}, named)
        sent = self._server.post("/update_weights_from_tensor", body)
        # on busy cores the lease may end first
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
            # only a rollback may be refused, without a previous version
            assert kind == "rollback", answer
            self.numbers.refused_updates += 1

    def _pause(self, mode: str) -> None:
        self._post("/pause_generation", self._pause_body(mode))
        self.numbers.pauses[mode] += 1

    def _pause_body(self, mode: str) -> dict[str, Any]:
        if mode == "abort":
            self._give_up_all()
        body: dict[str, Any] = {"mode": mode}
        if mode == "wait":
            body["timeout_s"] = WAIT_S
        if self._transparent:
            # a lease makes the pause real
            body["lease_s"] = LONG_LEASE_S
        return body

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.post(path, body)
        assert answer["status_code"] == 200, (path, answer)
        return answer

    def _finish(self) -> None:
        for stream in self._streams:
            # the stream ends in any way; on shared cores the longest may still have all its tokens
            # to make
            stream.wait_for_end(patience_s=600)
            self._check(stream)
        self._streams.clear()
        until_empty(self._server)
        until_idle(self._server)
        assert self._server.is_alive()

    def _rss(self) -> float:
        return sum(rank.memory_info().rss for rank in schedulers(self._server.process.pid)) / MIB


def expect_young(output: Output, most: int) -> None:
    """Check that KV of at most this age made the last token."""
    spans, kv = output.meta.get("weight_versions"), output.meta.get("kv_versions")
    if output.tokens and spans and kv:
        oldest = min(span["epoch"] for span in kv)
        assert spans[-1]["epoch"] - oldest <= most, f"KV is older than {most}: {output.meta}"


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
    parser.add_argument("--transparent", action="store_true", help="with windows")
    parser.add_argument(
        "--kv-refresh", choices=("soft", "hard"), help="with a budget of tokens per step"
    )
    parser.add_argument("--on", type=named, default=CONFIGURATIONS[0], help="one rank")
    arguments = parser.parse_args()
    print(f"--seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Trainers()) as trainers:
        folder = Path(name)
        for version in range(VERSIONS):
            arguments.on.model.build(folder / f"v{version}", version)
        sender = Sender(folder, folder, trainers, arguments.on.model)
        most = str(max(MAX_RUNNING, arguments.streams))
        on = arguments.on
        loras = LORA_FLAGS if on is CONFIGURATIONS[0] else ()
        flags = ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", most, *loras)
        if arguments.transparent:
            on = replace(on, env={**on.env, "SGLANG_INFLIGHT_TRANSPARENT": "1"})
        if arguments.kv_refresh:
            settings = {
                "SGLANG_INFLIGHT_KV_REFRESH": arguments.kv_refresh,
                "SGLANG_INFLIGHT_KV_REFRESH_TOKENS_PER_STEP": str(KV_TOKENS_PER_STEP),
            }
            on = replace(on, env={**on.env, **settings})
        with on.serve(folder / "v0", folder, *flags) as server:
            soak = Soak(
                server, folder, sender, trainers,
                arguments.seed, arguments.streams, arguments.on,
                transparent=arguments.transparent, is_soft=arguments.kv_refresh == "soft",
            )  # fmt: skip
            try:
                numbers = soak.run(
                    arguments.minutes, tokens=arguments.tokens, commits=arguments.commits
                )
            except BaseException:
                # print the log before its folder is deleted
                print(server.log_text()[-LOG_SHOWN:])
                raise
    show(numbers)
    return 1 if numbers.lost_requests or numbers.growth > MOST_GROWTH else 0


if __name__ == "__main__":
    raise SystemExit(main())
