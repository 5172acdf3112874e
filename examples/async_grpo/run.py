"""One run: train for a time by one way of updating, then evaluate what was learned when.

This thread is the trainer. It takes finished groups, makes a step, and updates the server. The
thread of the rollouts asks for new answers meanwhile. Everything that is only measured comes after
the time, so it costs the run nothing.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from examples.async_grpo import grpo, task
from examples.async_grpo.again import Replayed, replay
from examples.async_grpo.evaluation import expected_reward
from examples.async_grpo.labels import KVCost, LabelCheck, check_labels, measure_kv_cost
from examples.async_grpo.model import Weights, served_weights, with_weights
from examples.async_grpo.rollouts import Group, Rollouts, Tokens, standstills
from examples.async_grpo.ways import Sends, Way
from sglang_inflight.client import Client, Sender, ShardSender

RECOMPUTED = "sglang:inflight_recomputed_tokens_total", ""
# without those that the prefix cache had
PREFILLED = "sglang:realtime_tokens_total", 'mode="prefill_compute"'
POLL_S = 0.5
# answers of a run whose log-probabilities are computed with fresh KV
COMPUTED_AGAIN = 256


@dataclass(frozen=True)
class Settings:
    """``seconds`` is the budget of a run, which also ends after ``steps`` steps, if given.

    A step takes ``groups`` groups of ``group_size``. A server that never waits has ``running``
    groups. ``max_version_lag`` is how many versions behind the trainer a token may be. ``sharded``
    sends as trainers of many processes do.
    """

    seconds: float = 120.0
    steps: int | None = None
    groups: int = 8
    group_size: int = 8
    running: int = 16
    learning_rate: float = 2e-4
    max_version_lag: int = 8
    evaluations: int = 24
    sharded: bool = False
    # questions of a conversation
    turns: int = 1
    # answers that are made again after the run, on a server with SGLANG_INFLIGHT_REPLAY
    replays: int = 0


@dataclass(frozen=True)
class StepRecord:
    """A step of the trainer. ``ended`` is the time since the run's start, after the update.

    Times are seconds. ``samples`` counts all samples up to this step, and ``reward`` is the mean
    of this step's. ``changed`` is the share of the weights that the update changed.
    """

    ended: float
    samples: int
    reward: float
    loss: float
    ratio_off: float
    clipped: float
    waited: float
    trained: float
    updated: float
    changed: float


@dataclass
class Result:
    """Measurements of a run. Times are seconds since its start."""

    way: str
    seed: int
    seconds: float = 0.0
    # time, samples trained on, and expected reward of held-out questions
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    # tokens trained on, by how many versions they were behind
    ages: dict[int, int] = field(default_factory=dict)
    # their log-probabilities' mean distance from the trainer's, in nats, the same way
    mismatch: dict[int, float] = field(default_factory=dict)
    tokens_made: int = 0
    tokens_trained: int = 0
    tokens_thrown_away: int = 0
    tokens_too_old: int = 0
    tokens_recomputed: int = 0
    standstills: list[tuple[float, float]] = field(default_factory=list)
    # tokens of all prefills, without those found in the cache
    tokens_prefilled: int = 0
    labels: LabelCheck | None = None
    kv_cost: KVCost | None = None
    replayed: Replayed | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Trainer:
    """Trains ``model`` on a server's answers, and keeps each version that it sends."""

    def __init__(self, model: Any, way: Way, settings: Settings, result: Result) -> None:
        self.versions: dict[int, Weights] = {0: served_weights(model)}
        self.samples: list[grpo.Sample] = []
        self._model = model
        self._way, self._settings, self._result = way, settings, result
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._step = 0
        self._ages: Counter[int] = Counter()
        self._mismatch: dict[int, grpo.Mismatch] = {}

    def train(
        self,
        rollouts: Rollouts,
        update: Callable[[Weights, int], float],
        on_progress: Callable[[float], None],
    ) -> None:
        """Train until the time is over. ``update`` sends a version, and returns what it changed."""
        start = time.monotonic()
        groups = self._settings.groups
        ahead = 0 if self._way.takes_turns else self._settings.running
        rollouts.allow(groups + ahead)
        while True:
            began = time.monotonic()
            batch = self._collect(rollouts, start, on_progress)
            if batch is None:
                break
            collected = time.monotonic()
            learned, mismatch = grpo.train(self._model, self._optimizer, batch, version=self._step)
            trained = time.monotonic()
            self._ages += grpo.count_ages(batch, self._step)
            for age, found in mismatch.items():
                self._mismatch[age] = self._mismatch.get(age, grpo.NO_TOKENS) + found
            self._step += 1
            weights = self.versions[self._step] = served_weights(self._model)
            changed = update(weights, self._step)
            ended = time.monotonic()
            if self._way.takes_turns:
                rollouts.allow(groups)
            samples = [sample for group in batch for sample in group]
            self.samples += samples
            self._result.tokens_trained += sum(len(sample.answer) for sample in samples)
            self._result.steps.append(
                StepRecord(
                    ended=ended - start,
                    samples=len(self.samples),
                    reward=sum(sample.reward for sample in samples) / len(samples),
                    **learned._asdict(),
                    waited=collected - began,
                    trained=trained - collected,
                    updated=ended - trained,
                    changed=changed,
                )
            )
        self._result.seconds = time.monotonic() - start
        self._result.ages = dict(sorted(self._ages.items()))
        self._result.mismatch = {
            age: found.nats / found.tokens for age, found in sorted(self._mismatch.items())
        }

    def _collect(
        self, rollouts: Rollouts, start: float, on_progress: Callable[[float], None]
    ) -> list[Group] | None:
        """Return a step's groups, or None when the run is over."""
        batch: list[Group] = []
        if self._step == self._settings.steps:
            return None
        while (now := time.monotonic() - start) < self._settings.seconds:
            on_progress(now)
            if len(batch) == self._settings.groups:
                return batch
            group = rollouts.take(timeout_s=POLL_S)
            if group is None:
                continue
            if not self._way.takes_turns:
                rollouts.allow(1)
            if self._step - grpo.oldest_version(group) <= self._settings.max_version_lag:
                batch.append(group)
            else:
                self._result.tokens_too_old += sum(len(sample.answer) for sample in group)
        return None


def run(
    way: Way,
    url: str,
    base: Any,
    settings: Settings,
    *,
    seed: int,
    on_progress: Callable[[float], None],
) -> Result:
    """Train a copy of ``base`` for ``settings.seconds``, and evaluate it."""
    model = copy.deepcopy(base)
    result = Result(way.name, seed)
    trainer = _Trainer(model, way, settings, result)
    rollouts = Rollouts(
        url,
        seed=seed,
        running=settings.groups if way.takes_turns else settings.running,
        group_size=settings.group_size,
        max_version_lag=settings.max_version_lag,
        turns=settings.turns,
        kept=settings.replays,
    )
    with Client(url) as client, _sender(client, way, sharded=settings.sharded) as sender:

        def update(weights: Weights, version: int) -> float:
            receipt = way.update(client, sender, weights, version)
            return float((receipt["staged_as"] or {})["changed_fraction"])

        sender.send(trainer.versions[0].items(), weight_version="0")
        recomputed, prefilled = _count_tokens(url, RECOMPUTED), _count_tokens(url, PREFILLED)
        start = time.monotonic()
        with rollouts.going():
            trainer.train(rollouts, update, on_progress)
            end = time.monotonic()
        result.tokens_recomputed = _count_tokens(url, RECOMPUTED) - recomputed
        result.tokens_prefilled = _count_tokens(url, PREFILLED) - prefilled
    _count(result, rollouts.tokens, start, end)
    httpx.post(f"{url}/abort_request", json={"abort_all": True}).raise_for_status()

    if settings.replays:
        result.replayed = replay(url, rollouts.kept, trainer.versions)
    # which KV a token read can be told from its label alone if all KV is kept, or none
    if not way.kept_kv and settings.turns == 1:
        result.labels = check_labels(
            model, trainer.samples, trainer.versions, recomputes=way.recomputes
        )
    result.kv_cost = measure_kv_cost(model, trainer.samples, trainer.versions, most=COMPUTED_AGAIN)
    questions = task.held_out()
    points = [(0, 0.0, 0)]
    points += [(n, step.ended, step.samples) for n, step in enumerate(result.steps, 1)]
    stride = max(1, len(points) // settings.evaluations)
    for version, seconds, samples in sorted({*points[::stride], points[-1]}):
        score = expected_reward(with_weights(model, trainer.versions[version]), questions)
        result.curve.append((seconds, samples, score))
        on_progress(settings.seconds)
    return result


@contextmanager
def _sender(client: Client, way: Way, *, sharded: bool) -> Iterator[Sends]:
    if not sharded:
        with Sender(client, sparse=way.sparse) as sender:
            yield sender
        return
    # torchrun would form this group, of one rank for each process
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with ShardSender(client) as sender_of_shards:
            yield sender_of_shards
    finally:
        dist.destroy_process_group()


def _count(result: Result, tokens: Tokens, start: float, end: float) -> None:
    result.tokens_made = tokens.made
    result.tokens_thrown_away = tokens.thrown_away
    result.tokens_too_old += tokens.outdated
    arrivals = [arrival for arrival in tokens.arrivals if arrival < end]
    result.standstills = standstills(arrivals, start, end)


def _count_tokens(url: str, counter: tuple[str, str]) -> int:
    """Return how many tokens the server has counted since its start, in a counter with a label."""
    name, label = counter
    lines = httpx.get(f"{url}/metrics", follow_redirects=True).raise_for_status().text.splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)
    )
