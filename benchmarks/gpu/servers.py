"""Servers of the kit, with decode graphs on a card, and streams that note when tokens come."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu import card
from benchmarks.gpu.card import has_card, has_gpu, is_glass
from benchmarks.gpu.step import timed
from harness.marker import FIRST
from harness.server import Server, serve
from sglang_inflight.client import read_spans, version_per_token
from tests.support.load import Generation, Output, more_tokens, status

STREAMS = 16
MOST_TOKENS = 12 << 10
# further flags for all servers, for machines that lack kernels
FLAGS = "GPU_KIT_FLAGS"
# decode steps
_LOGGED_EVERY = 10
_ON_A_CARD = (
    "--cuda-graph-max-bs-decode", str(STREAMS),
    # the kit decodes; capturing prefills takes a large part of a start
    "--disable-prefill-cuda-graph",
    # the log says whether a graph ran, also of short runs
    "--decode-log-interval", str(_LOGGED_EVERY),
)  # fmt: skip
_GRAPH_RAN = "cuda graph: True"

T = TypeVar("T")


def without_us() -> dict[str, str]:
    """Return the environment of SGLang with no plugin but the one that makes it run here."""
    return {"SGLANG_PLUGINS": "inflight_glass" if is_glass() else "inflight_reference"}


@contextlib.contextmanager
def serving(
    model: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve ``model`` as version v0, and end the server afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = (
        "--weight-version", "v0", "--incremental-streaming-output",
        # a stream that may not fit waits for the others
        "--max-total-tokens", str(STREAMS * MOST_TOKENS),
        *(_ON_A_CARD if has_card() else ()), *shlex.split(os.environ.get(FLAGS, "")), *flags,
    )  # fmt: skip
    with serve(model, *flags, log=log, env=dict(env or {})) as server:
        yield server


@contextlib.contextmanager
def started(
    starts: Mapping[str, Callable[[], AbstractContextManager[T]]], *, at_once: bool | None = None
) -> Iterator[Callable[[str], AbstractContextManager[T]]]:
    """Yield a function that returns the server of a name, for a ``with`` statement.

    With ``at_once``, the default on a GPU, all servers start at the same time, because a start
    mostly waits. Else each one starts and ends in its statement. An error of a start comes from
    the function's statement.
    """
    if not (has_gpu() if at_once is None else at_once):
        yield lambda name: starts[name]()
        return
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(starts)) as pool:
        found = {name: pool.submit(stack.enter_context, start()) for name, start in starts.items()}
        yield lambda name: contextlib.nullcontext(found[name].result())


class Stream(Generation):
    """A request that gets its new tokens alone in each chunk, and notes the time of each chunk."""

    def __init__(self, server: Server, *, tokens: int) -> None:
        # when a chunk came, by the clock of ``time.perf_counter``, and how many tokens it had
        self.arrivals: list[tuple[float, int]] = []
        super().__init__(server, tokens=tokens)

    def _take(self, index: int, chunk: dict[str, Any]) -> None:
        if "meta_info" in chunk:
            self.arrivals.append((time.perf_counter(), len(chunk["output_ids"])))
            chunk["output_ids"] = self._outputs[index].tokens + chunk["output_ids"]
        super()._take(index, chunk)


def start_streams(
    server: Server, *, tokens: int = MOST_TOKENS - 64, count: int = STREAMS
) -> list[Stream]:
    """Start ``count`` streams, and wait until each has three tokens."""
    streams = [Stream(server, tokens=tokens) for _ in range(count)]
    for stream in streams:
        stream.wait_for_tokens(3)
    return streams


def end_streams(streams: Sequence[Stream]) -> list[Output]:
    """Abort the streams, and return the tokens and spans of each."""
    for stream in streams:
        stream.abort()
    return [stream.output() for stream in streams]


Window = tuple[float, float]


def gaps(streams: Sequence[Stream], windows: Sequence[Window]) -> list[float]:
    """Return the milliseconds between two chunks of a stream that overlap one of the windows."""
    found = []
    for stream in streams:
        times = [at for at, _ in list(stream.arrivals)]
        found += [
            (after - before) * 1e3
            for before, after in itertools.pairwise(times)
            if any(after >= begin and before <= end for begin, end in windows)
        ]
    return found


def tokens_per_s(streams: Sequence[Stream], windows: Sequence[Window]) -> float:
    """Return the tokens that all streams got in the windows, per second of a window."""
    tokens = sum(
        count
        for stream in streams
        for at, count in list(stream.arrivals)
        if any(begin <= at < end for begin, end in windows)
    )
    return tokens / sum(end - begin for begin, end in windows)


def mislabelled(outputs: Sequence[Output]) -> int:
    """Return the number of tokens whose version, by the spans, is not that of their weights."""
    wrong = 0
    for output in outputs:
        labels = version_per_token(output.meta)
        if len(labels) != len(output.tokens):
            raise AssertionError(f"spans {read_spans(output.meta)}, tokens {len(output.tokens)}")
        wrong += sum(
            label != f"v{token - FIRST}" for label, token in zip(labels, output.tokens, strict=True)
        )
    return wrong


def label_values(outputs: Sequence[Output]) -> dict[str, int]:
    """Return the numbers of tokens and of wrong labels. Any wrong one is an error."""
    wrong = mislabelled(outputs)
    if wrong:
        raise AssertionError(f"{wrong} tokens are of other weights than their labels say")
    tokens = sum(len(output.tokens) for output in outputs)
    return {"tokens": tokens, "tokens_mislabelled": wrong, "tokens_mislabelled_limit": 0}


def expect_graphs(server: Server, streams: Sequence[Generation] = ()) -> None:
    """On a card, check that decode steps replayed captured graphs.

    First wait until the running ``streams`` have made the steps after which the log says so.
    """
    for _ in range(_LOGGED_EVERY + 1 if streams else 0):
        more_tokens(list(streams))
    if has_card() and _GRAPH_RAN not in server.log_text():
        raise AssertionError("no decode step replayed a captured graph")


def digest(server: Server) -> str:
    """Return the digest of the served weights of the only rank."""
    found: str | None = status(server)["digest"]
    if found is None:
        raise AssertionError("the server has no digest")
    return found


def copy_bytes_per_s(size: int = 1 << 30, runs: int = 10) -> float:
    """Return the bytes that the card reads and writes per second in a copy of ``size`` bytes."""
    milliseconds = _copy_ms(size, runs)
    # what stays allocated in this process is missing to the servers
    card.module().empty_cache()
    return 2 * size / milliseconds * 1e3


def _copy_ms(size: int, runs: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=card.device())
    target = torch.empty_like(source)
    return statistics.median(timed(lambda: target.copy_(source), runs=runs))
