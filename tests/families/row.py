"""One row: an update of a model class under running requests, compared with a fresh start."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import is_generation_model

from harness.server import Server, serve
from tests.families import tensors, tiny
from tests.families.families import FAMILIES, Family
from tests.families.result import (
    IN_PLACE,
    NOT_BUILT,
    REFUSED,
    STAGED,
    WRONG,
    Result,
    named_error,
    one_line,
)
from tests.support.load import ENDLESS, more_tokens, start_running, status
from tests.support.plugins import with_plugin
from tests.support.pool import empty
from tests.support.updates import message_of, succeed, tensor_body

FLAGS = (
    "--weight-version", "v0",
    "--skip-tokenizer-init",
    # weights that no checkpoint brings need it
    "--random-seed", "0",
    "--max-total-tokens", "16384",
    "--max-running-requests", "8",
)  # fmt: skip
ENV = {
    **with_plugin("on_a_cpu"),
    # there is no GPU, for which Triton would compile SGLang's kernels
    "TRITON_INTERPRET": "1",
    # new memory is zeros, also that of weights that no checkpoint brings
    "MALLOC_PERTURB_": "255",
}
TENSORS_TIMEOUT_S = 120
LENGTHS = (5, 24, 70)
NEW_TOKENS = 8
LOGPROBS = (
    "input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs",
)  # fmt: skip

Answers = list[Any]
Checksums = list[dict[str, str]]


class NotServed(Exception):
    """A model that SGLang cannot serve here, with SGLang's error."""


class Refusal(Exception):
    """A server's refusal of an update."""


@dataclass
class Running:
    """A running server of a class."""

    server: Server
    generates: bool

    def answers(self) -> Answers:
        """Return the answers to all prompts, one request at a time: a batch's size may count."""
        return [self._answer(prompt) for prompt in _prompts()]

    def _answer(self, prompt: list[int]) -> Any:
        succeed_in_flushing(self.server)
        if not self.generates:
            answer = self.server.post("/encode", {"input_ids": prompt})
            assert answer["status_code"] == 200, answer
            values = answer["embedding"]
            assert all(map(math.isfinite, _numbers(values))), values
            return values
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
        }
        answer = self.server.post("/generate", body)
        assert answer["status_code"] == 200, answer
        values = [answer["output_ids"], *(answer["meta_info"][name] for name in LOGPROBS)]
        # the first token of a prompt has no probability
        known = [value for value, _, _ in values[1][1:] + values[3]]
        assert known, values
        assert all(value is not None and math.isfinite(value) for value in known), values
        return values

    def checksums(self) -> Checksums:
        """Return the checksums of all parameters and buffers, by rank."""
        answer = succeed(self.server.post("/weights_checker", {"action": "checksum"}))
        return [rank["checksums"] for rank in answer["ranks"]]

    def update(self, source: str, **body: Any) -> str:
        """Update under running requests, and return the form in which the weights were staged."""
        running = start_running(self.server, 2, tokens=ENDLESS // 4) if self.generates else []
        fields = {"non_blocking": True, "kv_cache": "keep", **body}
        answer = self.server.post(f"/update_weights_from_{source}", fields)
        if answer["status_code"] != 200 or not answer["success"]:
            raise Refusal(message_of(answer))
        more_tokens(running)
        empty(self.server)
        form: str = answer["staged_as"]["form"]
        return form

    def why_in_place(self) -> str:
        return status(self.server)["capabilities"]["stage"] or "the server names no reason"


def succeed_in_flushing(server: Server) -> None:
    answer = server.post("/flush_cache", {})
    assert answer["status_code"] == 200, answer


def run(name: str, folder: Path, *, servers: bool = True) -> Result:
    """Run the row of class ``name``, with checkpoints and logs in ``folder``.

    Without ``servers`` only tensors are compared, in a process of their own.
    """
    family = FAMILIES.get(name, Family())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        # SGLang keeps parts of a configuration in the process
        job = pool.apply_async(_compare_tensors, (name, family, folder))
        try:
            result = job.get(TENSORS_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            return Result(NOT_BUILT, f"no small checkpoint within {TENSORS_TIMEOUT_S} s")
    if result.kind == NOT_BUILT:
        return result
    if not servers:
        return result.alone("this row has not been run with servers")
    try:
        served = _Row(name, family, folder, stages=result.kind == STAGED).compare()
        return replace(served, counts=result.counts)
    except NotServed as error:
        return result.alone(f"SGLang does not serve it on a CPU: {error}")


def _compare_tensors(name: str, family: Family, folder: Path) -> Result:
    # the threads of the forked process are not here, and torch would wait for them
    torch.set_num_threads(1)
    try:
        tiny.build(name, family, folder)
    except Exception as error:
        return Result(NOT_BUILT, f"no small checkpoint: {named_error(error)}")
    return tensors.compare(family, folder)


class _Row:
    def __init__(self, name: str, family: Family, folder: Path, *, stages: bool) -> None:
        self._folder = folder
        self._second = {"SGLANG_INFLIGHT_STAGING": "changes"} if stages else {}
        self._generates = is_generation_model([name])
        flags = FLAGS + family.flags
        if not self._generates:
            flags += ("--is-embedding",)
        self._flags = flags
        self._env = family.env

    def compare(self) -> Result:
        """Compare updated servers with each other's start: one with copies, one with changes."""
        try:
            with contextlib.ExitStack() as stack:
                starts = [
                    lambda: stack.enter_context(self._serve(0)),
                    lambda: stack.enter_context(self._serve(1, self._second)),
                ]
                try:
                    a, b = _together(starts)
                    expected = [(each.answers(), each.checksums()) for each in (a, b)]
                except Exception as error:
                    log = self._log(0).read_text(errors="replace")
                    raise NotServed(_last_error(log)) from error
                return self._compare(a, b, expected)
        except Refusal as refusal:
            return Result(REFUSED, str(refusal))

    def _compare(
        self, a: Running, b: Running, expected: Sequence[tuple[Answers, Checksums]]
    ) -> Result:
        assert expected[0][1] != expected[1][1], "the versions do not differ"
        assert expected[0][0] != expected[1][0], "the versions answer alike"
        folders = [self._folder / f"v{version}" for version in range(tiny.VERSIONS)]
        forms = []
        body = tensor_body(tiny.read(folders[0]))
        steps: list[tuple[str, Running, int, Callable[[], str]]] = [
            ("from disk", a, 1, lambda: a.update("disk", model_path=str(folders[1]))),
            ("from tensors", a, 0, lambda: a.update("tensor", **body)),
            ("as changes", b, 0, lambda: b.update("disk", model_path=str(folders[0]))),
        ]
        for how, running, version, update in steps:
            forms.append(update())
            answers, checksums = expected[version]
            different = _different(running.checksums(), checksums)
            if running.answers() != answers:
                return Result(WRONG, f"{how}: other logits; other tensors: {different or 'none'}")
            if different:
                return Result(WRONG, f"{how}: other tensors: {different}")
        if "off" in forms:
            return Result(IN_PLACE, a.why_in_place())
        return Result(STAGED)

    @contextlib.contextmanager
    def _serve(self, version: int, env: dict[str, str] | None = None) -> Iterator[Running]:
        model = self._folder / f"v{version}"
        env = {**ENV, **self._env, **(env or {})}
        with serve(model, *self._flags, log=self._log(version), env=env) as server:
            yield Running(server, self._generates)

    def _log(self, version: int) -> Path:
        return self._folder / f"log{version}"


def _together(starts: list[Callable[[], Running]]) -> list[Running]:
    with ThreadPoolExecutor(len(starts)) as pool:
        return list(pool.map(lambda start: start(), starts))


def _prompts() -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(100, 500) for _ in range(length)] for length in LENGTHS]


def _numbers(values: Any) -> Iterator[float]:
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, list):
            yield from _numbers(value)
        else:
            yield value


def _different(ours: Checksums, theirs: Checksums) -> str:
    """Return the names of some tensors that differ."""
    names = [
        name
        for one, other in zip(ours, theirs, strict=True)
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
    return ", ".join(names[:4])


def _last_error(log: str) -> str:
    """Return the exception that ended a server, from its log."""
    _, _, end = log.rpartition("Scheduler hit an exception")
    error = re.search(r"^(?:[a-z_.]+\.)?[A-Z]\w*(?:Error|Exception)\b.*$", end, re.MULTILINE)
    return one_line(error.group()) if error else "its log names no error"
