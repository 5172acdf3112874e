"""SGLang's own ``bench_serving`` against a server updated during the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from harness.server import PLAIN, Server
from harness.starting import end, start
from tests.support.load import pause, prompt, resume, status, until, update

REQUESTS = 100
# keep-alive lines on a probe stream; the benchmark's silent streams get as many
LINES = 5
# the longest that one benchmark may take to import SGLang, or to end
BENCHMARK_S = 240.0


@contextmanager
def benchmark(server: Server, backend: str, checkpoints: Path, out: Path) -> Iterator[None]:
    """Run the benchmark beside the block, then check that it ended without an error."""
    model = str(checkpoints / "v0")
    command = [
        "-m", "sglang.bench_serving",
        "--backend", backend, "--base-url", server.url,
        "--dataset-name", "random-ids", "--tokenizer", model,
        "--num-prompts", str(REQUESTS), "--random-input-len", "16", "--random-output-len", "50",
        "--warmup-requests", "0", "--disable-tqdm", "--output-file", str(out), "--output-details",
    ]  # fmt: skip
    with out.with_suffix(".log").open("wb") as log:
        process = start(command, output=log)
    try:
        yield
        assert process.wait(timeout=BENCHMARK_S) == 0, out.with_suffix(".log").read_text()[-3000:]
    finally:
        end(process)


def read_empty_lines(server: Server, count: int) -> None:
    """Check that a stream waiting in the pause receives ``count`` empty lines and nothing else."""
    body = {"input_ids": prompt(), "stream": True, "sampling_params": {"max_new_tokens": 1}}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=120, **PLAIN) as answer:
        received = b""
        for chunk in answer.iter_raw():
            received += chunk
            if len(received) >= count:
                break
    assert received[:count] == b"\n" * count


def test_bench_serving_completes_every_request_through_pauses_and_an_update(
    server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """The pauses meet requests before their first token, and requests with some tokens."""
    outs = {backend: tmp_path / f"{backend}.jsonl" for backend in ("sglang", "sglang-oai-chat")}
    pause(server, "in_place")
    with ExitStack() as benchmarks:
        for backend, out in outs.items():
            benchmarks.enter_context(benchmark(server, backend, checkpoints, out))
        every = REQUESTS * len(outs)
        until(
            "all of them wait",
            lambda: status(server)["waiting"] == every,
            patience_s=BENCHMARK_S,
        )
        read_empty_lines(server, LINES)
        resume(server)
        until("some run", lambda: status(server)["running"] > 0)
        pause(server, "in_place")
        assert status(server)["running"] > 0
        read_empty_lines(server, LINES)
        update(server, checkpoints, 1, non_blocking=True)
        read_empty_lines(server, LINES)
        resume(server)
    for out in outs.values():
        (result,) = map(json.loads, out.read_text().splitlines())
        assert result["completed"] == REQUESTS
        assert [error for error in result["errors"] if error] == []
