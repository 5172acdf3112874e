"""Rollouts on a fleet whose servers are killed, drained and brought back at random.

``python -m tests.support.kills --minutes 10`` has a trainer that updates the fleet meanwhile. It
checks each answer by the marker: each token is the one of the version that its span names. With
``--front`` the rollouts go through ``sglang-inflight front``, whole and streamed. It prints the
numbers as JSON. The exit status is 0 only if no rollout was lost, and none was wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from harness import marker
from harness.server import PLAIN, Server, free_port, serve
from harness.streams import read_event
from sglang_inflight.client import Fleet, FleetSplit, VersionUnclear
from sglang_inflight.vocabulary.errors import InflightError
from sglang_inflight.vocabulary.kept_kv import KVPolicy
from tests.support.front_process import run_front
from tests.support.load import prompt

Json = dict[str, Any]
SERVERS, ROLLOUTS, VERSIONS = 3, 8, 6
LENGTHS = (20, 400, 2000, 6000)
POLICIES: tuple[KVPolicy, ...] = ("keep", "fence", "recompute")
# seconds between two updates, and between two servers that leave
UPDATES_S, LEAVES_S = 1.0, 6.0
# a server comes back unready, until it serves the fleet's version
ENV = {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1", "SGLANG_INFLIGHT_DRAIN_S": "1"}
# log probabilities and the texts of tokens are joined, too
FIELDS: tuple[dict[str, Any], ...] = ({}, {"return_logprob": True})


class Wrong(Exception):
    """An answer that is no whole rollout of its versions."""


class Place:
    """One server's URL, and the server there, if one runs."""

    def __init__(self, number: int, checkpoints: Path, logs: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._number, self._checkpoints, self._logs = number, checkpoints, logs
        self._lives = 0
        self.server: Server | None = None
        self._stack = ExitStack()

    def start(self) -> None:
        self._lives += 1
        log = self._logs / f"{self._number}-{self._lives}.log"
        flags = ("--weight-version", "none", "--incremental-streaming-output")
        block = serve(
            self._checkpoints / "v0", *flags[: 2 + self._number % 2], log=log, env=ENV,
            port=self.port,
        )  # fmt: skip
        self._stack = ExitStack()
        self.server = self._stack.enter_context(block)

    def end(self) -> None:
        self.server = None
        self._stack.close()


class Kills:
    """The fleet, its trainer and its faults. Each thread counts in ``numbers`` under the lock."""

    def __init__(self, folder: Path, seed: int, minutes: float, *, by_front: bool) -> None:
        self._choose, self._seed = random.Random(seed), seed
        self._checkpoints = folder
        for version in range(VERSIONS):
            marker.write(folder / f"v{version}", marker.tensors(version))
        self.places = [Place(number, folder, folder) for number in range(SERVERS)]
        self._by_front, self._minutes = by_front, minutes
        self._ends_at = math.inf
        self._lock = threading.Lock()
        self.numbers: Counter[str] = Counter()
        self.losses: list[str] = []
        self._turn = threading.Lock()
        self._commits = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._ends_at

    def count(self, **numbers: int) -> None:
        with self._lock:
            self.numbers.update(numbers)

    def run(self) -> None:
        with ExitStack() as stack:
            fleet = stack.enter_context(Fleet([place.url for place in self.places]))
            for place in self.places:
                place.start()
            self._update(fleet)
            generate: Callable[[Json], Json] = fleet.generate
            if self._by_front:
                urls = [place.url for place in self.places]
                front = stack.enter_context(run_front(urls, self._checkpoints / "front.log"))
                generate = functools.partial(ask_front, front.url, random.Random(self._seed))
            self._ends_at = time.monotonic() + 60 * self._minutes
            with ThreadPoolExecutor(ROLLOUTS + 2) as threads:
                tasks = [threads.submit(self._roll_out, generate) for _ in range(ROLLOUTS)]
                tasks += [threads.submit(self._train, fleet), threads.submit(self._harm, fleet)]
            for task in tasks:
                task.result()

    # ---- rollouts ----------------------------------------------------------------------

    def _roll_out(self, generate: Callable[[Json], Json]) -> None:
        choose = random.Random(self._choose.random())
        while not self.is_over:
            length = choose.choice(LENGTHS)
            body = {
                "input_ids": prompt(choose.randrange(8, 200)),
                "sampling_params": {
                    "max_new_tokens": length, "temperature": 0, "ignore_eos": True,
                },
                **choose.choice(FIELDS),
            }  # fmt: skip
            try:
                answer = generate(body)
                check(answer, length)
            except (InflightError, httpx.HTTPError, Wrong) as error:
                with self._lock:
                    self.losses.append(f"{type(error).__name__}: {error}")
                continue
            moves = len(answer["meta_info"]["servers"]) - 1
            self.count(rollouts=1, tokens=length, moved=min(moves, 1), moves=moves)

    # ---- the trainer -------------------------------------------------------------------

    def _train(self, fleet: Fleet) -> None:
        while not self.is_over:
            time.sleep(UPDATES_S)
            with self._turn:
                self._update(fleet)

    def _update(self, fleet: Fleet) -> None:
        self._commits += 1
        version = self._commits % VERSIONS
        try:
            fleet.update_from_disk(
                str(self._checkpoints / f"v{version}"),
                weight_version=f"{self._commits}:{version}",
                kv_cache=self._choose.choice(POLICIES),
                non_blocking=True,
            )
            self.count(commits=1)
        except FleetSplit as split:
            fleet.client.leave_out(split.report.failures)
            self.count(splits=1)
        except InflightError:
            self.count(refused_updates=1)

    # ---- faults ------------------------------------------------------------------------

    def _harm(self, fleet: Fleet) -> None:
        choose = random.Random(self._choose.random())
        while not self.is_over:
            time.sleep(choose.uniform(0.5, 1.5) * LEAVES_S)
            place = choose.choice(self.places)
            server = place.server
            assert server is not None
            how = choose.choice(("killed", "terminated", "drained"))
            if how == "drained":
                fleet_client = next(s for s in fleet.client.servers if s.url == place.url)
                fleet.portal.call(fleet_client.drain, choose.choice((0.0, 0.5, 2.0)))
                time.sleep(choose.uniform(0, 1))
            server.process.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGKILL)
            server.process.wait()
            self.count(**{how: 1})
            place.end()
            with self._turn:
                fleet.client.leave_out([place.url])
            place.start()
            self._bring_back(fleet)

    def _bring_back(self, fleet: Fleet) -> None:
        """Bring the server to the fleet's version. The trainer makes no update meanwhile."""
        for _ in range(10):
            with self._turn:
                try:
                    report = fleet.catch_up()
                except VersionUnclear:
                    self._update(fleet)
                    continue
            if not report.failures:
                self.count(brought_back=1)
                return
        raise AssertionError(f"a server was not brought back: {report.failures}")


def ask_front(url: str, choose: random.Random, body: Json) -> Json:
    """Return the front's answer, or the last chunk of its stream."""
    if choose.random() < 0.5:
        answer = httpx.post(url + "/generate", json=body, timeout=None, **PLAIN)
        if not answer.is_success:
            raise Wrong(f"{answer.status_code} {answer.text[:500]}")
        whole: Json = answer.json()
        return whole
    last: Json = {}
    streamed = {**body, "stream": True}
    with httpx.stream("POST", url + "/generate", json=streamed, timeout=None, **PLAIN) as lines:
        for line in lines.iter_lines():
            if (event := read_event(line)) is None:
                continue
            had = last.get("output_ids", [])
            if event.get("output_ids", [])[: len(had)] != had:
                raise Wrong(f"{str(event)[:500]} behind {len(had)} tokens")
            last = event
    return last


def check(answer: Any, length: int) -> None:
    """Raise ``Wrong`` unless each token is its version's, and all are there."""
    if "output_ids" not in answer:
        raise Wrong(str(answer)[:500])
    tokens, meta = answer["output_ids"], answer["meta_info"]
    if meta["finish_reason"]["type"] != "length" or len(tokens) != length:
        raise Wrong(f"{len(tokens)} of {length} tokens, {meta['finish_reason']}")
    spans = meta["weight_versions"]
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends[-1] != length:
        raise Wrong(f"spans {spans} of {length} tokens")
    for span in spans:
        expected = marker.token(int(span["version"].partition(":")[2]))
        made = set(tokens[span["start"] : span["end"]])
        if made != {expected}:
            raise Wrong(f"tokens {made} in {span}, and not {expected}")
    where = [
        place["server"] for place in meta["servers"] for _ in range(place["start"], place["end"])
    ]
    made_by = [span["server"] for span in spans for _ in range(span["start"], span["end"])]
    if where != made_by:
        raise Wrong(f"spans {spans} beside {meta['servers']}")
    logprobs = meta.get("output_token_logprobs")
    if logprobs is not None and [token for _, token, *_ in logprobs] != tokens:
        raise Wrong(f"{len(logprobs)} log probabilities of other tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--front", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-inflight-kills-") as folder:
        kills = Kills(Path(folder), options.seed, options.minutes, by_front=options.front)
        try:
            kills.run()
        finally:
            for place in kills.places:
                place.end()
    told = {"seed": options.seed, "by_front": options.front}
    print(json.dumps({**told, **kills.numbers, "lost": kills.losses}, indent=1))
    return 1 if kills.losses else 0


if __name__ == "__main__":
    raise SystemExit(main())
