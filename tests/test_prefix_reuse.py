"""Random schedules whose reused prefixes and KV versions match a model of the cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.marker import FIRST
from harness.server import Server
from tests.support.cache_model import CacheModel
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_whole,
    labels_of,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    update,
)

SCHEDULES = 5
OPERATIONS = 20
VERSIONS = 6
MAX_RUNNING = 3


@dataclass
class Runner:
    """A request running beside others."""

    generation: Generation
    input_ids: list[int]
    cached: int
    # versions of the KV's first positions, as far as known
    known: list[str]
    # a fence has been raised since admission, so no other request reuses this KV
    is_barred: bool = False


class Schedule:
    """Operations drawn from a seed. The server starts with an empty cache and v0."""

    def __init__(self, server: Server, checkpoints: Path, seed: int) -> None:
        self._server = server
        self._checkpoints = checkpoints
        self._random = random.Random(seed)
        self._stems = [prompt(64) for _ in range(3)]
        self._cache = CacheModel()
        self._runners: list[Runner] = []
        self._version = 0

    def run(self) -> None:
        operations: list[Callable[[], None]] = [
            self.ask, self.ask, self.ask, self.begin, self.end, self.commit, self.retract,
        ]  # fmt: skip
        for _ in range(OPERATIONS):
            self._random.choice(operations)()
        while self._runners:
            self.end()

    def ask(self) -> None:
        """Run one request to its end while the runners continue."""
        input_ids = self._choose_prompt()
        tokens = self._random.randrange(1, 6)
        reused = self._cache.reusable(input_ids)
        (generation,) = start(self._server, 1, tokens=tokens, input_ids=input_ids)
        output = expect_whole(generation)
        assert output.meta["cached_tokens"] == len(reused)
        prompt_kv = self._cache.insert(input_ids, self._fill(reused, len(input_ids)))
        kv = self._fill(prompt_kv, len(input_ids) + tokens - 1)
        assert labels_of(output.meta["kv_versions"]) == kv
        self._cache.insert([*input_ids, *output.tokens[:-1]], kv)

    def begin(self) -> None:
        if len(self._runners) == MAX_RUNNING:
            return
        input_ids = self._choose_prompt()
        reused = self._cache.reusable(input_ids)
        (generation,) = start_running(self._server, 1, tokens=ENDLESS, input_ids=input_ids)
        known = self._cache.insert(input_ids, self._fill(reused, len(input_ids)))
        self._runners.append(Runner(generation, input_ids, len(reused), known))

    def end(self) -> None:
        if not self._runners:
            return
        runner = self._runners.pop(self._random.randrange(len(self._runners)))
        runner.generation.abort()
        output = expect_aborted(runner.generation)
        made_by = [f"v{made - FIRST}" for made in output.tokens]
        later = made_by[len(runner.known) + 1 - len(runner.input_ids) :]
        kv = runner.known + later
        assert labels_of(output.meta["kv_versions"]) == kv
        if not runner.is_barred:
            self._cache.insert([*runner.input_ids, *output.tokens[:-1]], kv)

    def commit(self) -> None:
        if self._version == VERSIONS - 1:
            return
        kv_cache = self._random.choice(["fence", "keep", "recompute"])
        # a pause makes the set of running requests known at the commit
        frozen = pause(self._server, "in_place")["pause_id"]
        generations = [runner.generation for runner in self._runners]
        counts = settle(self._server, generations)
        self._version += 1
        update(self._server, self._checkpoints, self._version, non_blocking=True, kv_cache=kv_cache)
        if kv_cache != "keep":
            self._cache.forget()
        for runner, count in zip(self._runners, counts, strict=True):
            if kv_cache == "recompute":
                self._note_recomputed(runner, count)
            else:
                runner.is_barred |= kv_cache == "fence"
        resume(self._server, pause_id=frozen)
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)

    def retract(self) -> None:
        """Retract the runners by a pause, so that they prefill anew."""
        if not self._runners:
            return
        frozen = pause(self._server, "retract")["pause_id"]
        generations = [runner.generation for runner in self._runners]
        counts = settle(self._server, generations)
        # one prefill batch takes all runners, so none can reuse another's new KV
        matched = [
            self._cache.reusable([*r.input_ids, *r.generation.tokens]) for r in self._runners
        ]
        resume(self._server, pause_id=frozen)
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)
        for runner, count, reused in zip(self._runners, counts, matched, strict=True):
            self._note_recomputed(runner, count, reused)

    def _note_recomputed(self, runner: Runner, count: int, reused: list[str] | None = None) -> None:
        """Note a prefill of the runner's prompt and ``count`` tokens by the current weights."""
        length = len(runner.input_ids) + count
        sequence = [*runner.input_ids, *runner.generation.tokens[:count]]
        runner.known = self._cache.insert(sequence, self._fill(reused or [], length))
        runner.is_barred = False

    def _choose_prompt(self) -> list[int]:
        stem = self._random.choice(self._stems)
        return stem[: self._random.randrange(4, len(stem))]

    def _fill(self, kv: list[str], length: int) -> list[str]:
        return kv + [f"v{self._version}"] * (length - len(kv))


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_prefix_reuse_and_kv_versions_match_the_cache_model(
    any_server: Server, checkpoints: Path, seed: int
) -> None:
    Schedule(any_server, checkpoints, seed).run()
