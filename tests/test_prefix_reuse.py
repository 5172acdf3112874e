"""Random schedules whose reused prefixes and KV versions match a model of the cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

SCHEDULES = 8
OPERATIONS = 20
VERSIONS = 6
MAX_RUNNING = 3


@dataclass
class Runner:
    """A request running beside others."""

    generation: Generation
    input_ids: list[int]
    # the cache's generation of its KV, and a lower bound of the epochs that made it
    key: int
    kv_epoch: int
    # versions of the KV's first positions, as far as known
    known: list[str]
    # its KV has become too old for others
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
        key, reused = self._cache.look_up(input_ids)
        (generation,) = start(self._server, 1, tokens=tokens, input_ids=input_ids)
        output = expect_whole(generation)
        assert output.meta["cached_tokens"] == len(reused)
        own_kv = self._fill(reused, len(input_ids))
        prompt_kv = self._cache.insert(key, input_ids, own_kv)
        # the prefill reads its own slots, and a later forward those that the cache has kept
        kv = self._fill(prompt_kv if tokens > 1 else own_kv, len(input_ids) + tokens - 1)
        assert labels_of(output.meta["kv_versions"]) == kv
        self._cache.insert(key, [*input_ids, *output.tokens[:-1]], kv)

    def begin(self) -> None:
        if len(self._runners) == MAX_RUNNING:
            return
        input_ids = self._choose_prompt()
        (generation,) = start_running(self._server, 1, tokens=ENDLESS, input_ids=input_ids)
        runner = Runner(generation, input_ids, 0, 0, [])
        self._note_prefilled(runner, input_ids, *self._cache.look_up(input_ids))
        self._runners.append(runner)

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
            self._cache.insert(runner.key, [*runner.input_ids, *output.tokens[:-1]], kv)

    def commit(self) -> None:
        if self._version == VERSIONS - 1:
            return
        policy: Any = self._random.choice(["fence", "keep", "recompute", 1, 2])
        fields = {"kv_max_age" if isinstance(policy, int) else "kv_cache": policy}
        # a pause makes the set of running requests known at the commit
        frozen = pause(self._server, "in_place")["pause_id"]
        generations = [runner.generation for runner in self._runners]
        counts = settle(self._server, generations)
        self._version += 1
        update(self._server, self._checkpoints, self._version, non_blocking=True, **fields)
        oldest = {"keep": None, "fence": 0, "recompute": 0}.get(policy, policy)
        self._cache.commit(oldest)
        if policy == "recompute":
            self._cache.flush()
        too_old = []
        for runner, count in zip(self._runners, counts, strict=True):
            age = self._cache.epoch - runner.kv_epoch
            if policy == "recompute" or (isinstance(policy, int) and age > policy):
                sequence = [*runner.input_ids, *runner.generation.tokens[:count]]
                too_old.append((runner, sequence, self._cache.of_newest(sequence)))
            else:
                runner.is_barred |= runner.kv_epoch < self._cache.floor
        resume(self._server, pause_id=frozen)
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)
        for runner, sequence, found in too_old:
            self._note_prefilled(runner, sequence, *found)

    def retract(self) -> None:
        """Retract the runners by a pause, so that they prefill anew."""
        if not self._runners:
            return
        frozen = pause(self._server, "retract")["pause_id"]
        generations = [runner.generation for runner in self._runners]
        counts = settle(self._server, generations)
        # one prefill batch takes all runners, so none can reuse another's new KV
        sequences = [
            [*runner.input_ids, *runner.generation.tokens[:count]]
            for runner, count in zip(self._runners, counts, strict=True)
        ]
        found = [self._cache.look_up(sequence) for sequence in sequences]
        resume(self._server, pause_id=frozen)
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)
        for runner, sequence, each in zip(self._runners, sequences, found, strict=True):
            self._note_prefilled(runner, sequence, *each)

    def _note_prefilled(
        self, runner: Runner, sequence: list[int], key: int, reused: list[str]
    ) -> None:
        """Note a prefill of ``sequence`` by the current weights."""
        runner.key, runner.kv_epoch = key, key if reused else self._cache.epoch
        runner.known = self._cache.insert(key, sequence, self._fill(reused, len(sequence)))
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
