"""Time until a pause is granted, and until tokens stop.

``answer`` is the time from the request to its answer. ``silence`` is the time from the request to
the last token's arrival, independent of the answer: upstream's answer says that the message was
sent, not that the engine stands still. A token sampled before the pause may arrive shortly after
the answer, on another connection. ``late`` counts tokens that arrive so much later that another
step must have run.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import Load, load, prompt, read_stream
from benchmarks.common.peers import NO_VLLM, Kind, Peer, every_kind, has_vllm, start
from benchmarks.common.report import Report, Summary

State = Literal["idle", "decoding", "prefill"]

PREFILL_TOKENS = 4096
SETTLED_S = 0.5  # seconds without a token until the server counts as still


@dataclass(frozen=True)
class Grant:
    answer_ms: float
    # None if no token came after the request
    silence_ms: float | None = None
    late: int = 0
    step_ms: float | None = None


def main(
    size: options.Size = "135m",
    streams: options.Streams = 8,
    samples: Annotated[
        int, typer.Option(help="pauses of each state and start; a third in prefills")
    ] = 20,
    chunk: Annotated[int, typer.Option(help="tokens of one prefill step")] = 512,
    tp_size: Annotated[int, typer.Option(min=1, help="ranks that share the model")] = 1,
    rounds: options.Rounds = 3,
    json: options.Json = None,
) -> None:
    """Time to pause: idle, while decoding, and in a prefill of 4096 tokens."""
    # vLLM has no tensor parallelism on so few cores
    kinds = [kind for kind in every_kind() if kind != "vllm" or tp_size == 1]
    report = Report(
        "pause_grant",
        (
            "server",
            "state",
            "answer, ms",
            "answer p95, ms",
            "silence, ms",
            "late tokens",
            "step, ms",
        ),
        {
            "size": size, "streams": streams, "samples": samples, "chunk": chunk,
            "tp_size": tp_size, "rounds": rounds,
        },
        notes=["upstream's answer is no acknowledgement: compare silence."],
    )  # fmt: skip
    if not has_vllm():
        report.notes.append(NO_VLLM)
    grants: dict[tuple[Kind, State], list[Grant]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for kind in kinds:
                flags = ("--tp-size", str(tp_size))
                with start(kind, model, chunk=chunk, flags=flags) as peer:
                    for state, found in asyncio.run(_measure(peer, streams, samples)).items():
                        grants[kind, state] += found
    for (kind, state), found in sorted(grants.items(), key=lambda item: item[0][1]):
        if found:
            _add_row(report, kind, state, found)
    _add_goals(report, grants, kinds)
    report.show()
    report.write(json)


def _add_row(report: Report, kind: Kind, state: State, grants: list[Grant]) -> None:
    answer = Summary.of(g.answer_ms for g in grants)
    silence = [g.silence_ms for g in grants if g.silence_ms is not None]
    steps = [g.step_ms for g in grants if g.step_ms is not None]
    report.add(
        server=kind,
        state=state,
        answer=answer,
        answer_p95=answer.p95,
        silence=Summary.of(silence) if silence else None,
        late=sum(g.late for g in grants),
        step=Summary.of(steps) if steps else None,
    )


def _add_goals(
    report: Report, grants: dict[tuple[Kind, State], list[Grant]], kinds: list[Kind]
) -> None:
    over = Summary.of(g.answer_ms - (g.step_ms or 0) for g in grants["ours", "decoding"])
    report.goal(
        "ours, decoding: median answer minus one step, ms, at most 5", over.median, at_most=5
    )
    report.goal(
        "ours, decoding: late tokens", sum(g.late for g in grants["ours", "decoding"]), at_most=0
    )
    for kind in kinds[1:]:
        theirs = _median_silence(grants[kind, "decoding"])
        ratio = _median_silence(grants["ours", "decoding"]) / theirs
        report.goal(f"decoding: silence over that of {kind}, at most 1.1", ratio, at_most=1.1)


def _median_silence(grants: list[Grant]) -> float:
    return Summary.of(g.silence_ms or 0.0 for g in grants).median


# ---- one server ---------------------------------------------------------------------


async def _measure(peer: Peer, streams: int, samples: int) -> dict[State, list[Grant]]:
    states: dict[State, Callable[[], Awaitable[list[Grant]]]]
    async with peer.client() as client:
        states = {
            "idle": lambda: _while_idle(peer, client, samples),
            "decoding": lambda: _while_decoding(peer, client, streams, samples),
            # a prefill of 4096 tokens takes some ten seconds
            "prefill": lambda: _while_prefilling(peer, client, max(3, samples // 3)),
        }
        return {state: await measure() for state, measure in states.items()}


async def _while_idle(peer: Peer, client: httpx.AsyncClient, samples: int) -> list[Grant]:
    grants = []
    for _ in range(1 + samples):
        _, answer_ms = await _pause(peer, client)
        await peer.resume(client)
        grants.append(Grant(answer_ms))
    return grants[1:]


async def _while_decoding(
    peer: Peer, client: httpx.AsyncClient, streams: int, samples: int
) -> list[Grant]:
    grants = []
    async with load(peer, client, streams, prompt_tokens=32, max_tokens=2048) as running:
        for _ in range(1 + samples):
            resumed = time.perf_counter()
            await running.wait_for(arrivals=8)
            await asyncio.sleep(random.uniform(0, 0.1))  # at any point of a step
            grants.append(await _pause_running(peer, client, running, since=resumed))
            await peer.resume(client)
    return grants[1:]


async def _pause_running(
    peer: Peer, client: httpx.AsyncClient, running: Load, *, since: float
) -> Grant:
    """Pause, and wait for silence. The step's length is measured from ``since`` to the pause."""
    steps = [stream.seconds_per_token(since, time.perf_counter()) for stream in running.streams]
    step_s = Summary.of(steps).median
    sent, answer_ms = await _pause(peer, client)
    answered = sent + answer_ms / 1000
    while time.perf_counter() - max(running.last_arrival(), answered) < SETTLED_S:
        await asyncio.sleep(SETTLED_S / 4)
    last = running.last_arrival()
    return Grant(
        answer_ms,
        silence_ms=1000 * (last - sent) if last > sent else None,
        late=running.tokens(answered + step_s / 2, float("inf")),
        step_ms=1000 * step_s,
    )


async def _while_prefilling(peer: Peer, client: httpx.AsyncClient, samples: int) -> list[Grant]:
    """Pause before a long prompt's first token, in any of its chunks."""
    await _first_token(peer, client)
    began = time.perf_counter()
    prefill_s = await _first_token(peer, client) - began
    grants = []
    for _ in range(samples):
        request = asyncio.create_task(_first_token(peer, client))
        await asyncio.sleep(prefill_s * random.uniform(0.1, 0.7))
        sent, answer_ms = await _pause(peer, client)
        await asyncio.sleep(SETTLED_S)
        came = request.done()
        await peer.resume(client)
        first = await request
        if came and first < sent:
            continue  # the prefill had ended before the pause
        grants.append(Grant(answer_ms, silence_ms=1000 * (first - sent) if came else None))
    return grants


async def _first_token(peer: Peer, client: httpx.AsyncClient) -> float:
    """Return the arrival time of a long prompt's only token."""
    arrivals = [at async for at, _ in read_stream(peer, client, prompt(PREFILL_TOKENS), 1)]
    return min(arrivals)


async def _pause(peer: Peer, client: httpx.AsyncClient) -> tuple[float, float]:
    """Return the time of the request, and the milliseconds until its answer."""
    sent = time.perf_counter()
    await peer.pause(client)
    return sent, 1000 * (time.perf_counter() - sent)


if __name__ == "__main__":
    typer.run(main)
