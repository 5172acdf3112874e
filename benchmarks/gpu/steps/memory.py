"""Tokens of KV with and without the package, a release under paused requests, and no memory."""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import card
from benchmarks.gpu.card import NotRun, has_card, has_gpu, is_glass, need_gpu
from benchmarks.gpu.marked import LARGE, SMALL, TINY, Marked
from benchmarks.gpu.servers import (
    digest,
    end_streams,
    expect_graphs,
    label_values,
    serving,
    start_streams,
    without_us,
)
from benchmarks.gpu.step import Step, Values, main
from harness.server import Server, schedulers
from tests.support.load import ask, more_tokens, pause, resume, settle, status, update
from tests.support.updates import LIVE, expect_served
from tests.support.updates import serving as served

LIMIT_S = 180
PARTS = ("tokens of KV", "no memory while staging", "release and resume")
# SGLang takes less if less is free
ALL_MEMORY = ("--max-total-tokens", str(1 << 31))
SAVER = ("--enable-memory-saver",)
# otherwise the memory saver leaves out the graphs' memory
SAVER_ENV = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# a glass card's memory is the host's, and KV takes most of it
LITTLE_GLASS = {"GLASS_MEMORY": str(1 << 29)}
OF_LITTLE_GLASS = ("--mem-fraction-static", "0.5")
_PIECE = 1 << 20


def run(step: Step) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _with_all_memory(step, _build(folder / "large", TINY if step.small else LARGE))
        model = _build(folder / "small", TINY if step.small else SMALL)
        with step.part("release and resume") as values:
            if has_gpu() and find_spec("torch_memory_saver") is None:
                raise NotRun("torch_memory_saver is not installed here.")
            log = step.logs / "release.log"
            with serving(model / "v0", *SAVER, log=log, env=SAVER_ENV) as server:
                _release(server, model, values)


def _build(folder: Path, model: Marked) -> Path:
    for version in range(2):
        model.build(folder / f"v{version}", version)
    return folder


def _with_all_memory(step: Step, model: Path) -> None:
    """Run the parts whose servers give the KV cache all the memory that they may."""
    # on a CPU the flag decides, not the memory
    flags: tuple[str, ...] = ALL_MEMORY if has_card() else ()
    env = LITTLE_GLASS if is_glass() else {}
    flags += OF_LITTLE_GLASS if is_glass() else ()
    server: Server | None = None
    with contextlib.ExitStack() as stack:
        with step.part("tokens of KV") as values:
            log = step.logs / "without.log"
            without = serving(model / "v0", *flags, log=log, env={**env, **without_us()})
            with without as upstream:
                # SGLang alone is the limit
                values["kv_tokens_limit"] = _kv_tokens(upstream)
            log = step.logs / "with.log"
            server = stack.enter_context(serving(model / "v0", *flags, log=log, env=env))
            values["kv_tokens"] = _kv_tokens(server)
            for form, tokens in status(server)["staging"]["kv_tokens"].items():
                values[f"kv_tokens_taken_by_{form}"] = tokens
        with step.part("no memory while staging") as values:
            need_gpu("A process cannot take the memory of another process' glass card.")
            if server is None:
                raise NotRun("Its server did not start.")
            _no_memory(server, model, values)


def _kv_tokens(server: Server) -> int:
    tokens: int = server.get("/server_info")["max_total_num_tokens"]
    return tokens


def _release(server: Server, folder: Path, values: Values) -> None:
    """Release everything under paused requests, once with the weights kept and once without."""
    update(server, folder, 0, **LIVE)
    before = digest(server)
    streams = start_streams(server)
    for keep in ("host", "discard"):
        pause(server, "retract")
        settle(server, list(streams))
        had = _in_use(server)
        moved = ask(server, "POST", "/release_memory_occupation", {"keep_weights": keep})
        values[f"released_{keep}_bytes"] = had - _in_use(server)
        values[f"release_{keep}_s"] = moved["ranks"][0]["seconds"]
        # graphs of the glass card keep their memory
        if has_gpu() and not moved["ranks"][0]["bytes"].get("cuda_graph"):
            raise AssertionError(f"no memory of graphs was released: {moved}")
        resumed = {}
        if keep == "discard":
            resumed["weights"] = _resume_memory(server, "weights")
            update(server, folder, 1, **LIVE)
            resumed["rest"] = _resume_memory(server, "kv_cache", "cuda_graph")
        else:
            resumed["all"] = _resume_memory(server)
            if digest(server) != before:
                raise AssertionError("the weights came back changed")
        values[f"resume_{keep}_s"] = sum(resumed.values())
        resume(server)
        more_tokens(list(streams))
    expect_graphs(server, streams)
    values |= label_values(end_streams(streams))
    expect_served(server, 1)


def _resume_memory(server: Server, *tags: str) -> float:
    body = {"tags": list(tags)} if tags else {}
    moved = ask(server, "POST", "/resume_memory_occupation", body)
    seconds: float = moved["ranks"][0]["seconds"]
    return seconds


def _in_use(server: Server) -> int:
    """Return the bytes in use on the GPU, or of the schedulers' processes."""
    if has_gpu():
        free, total = card.module().mem_get_info()
        return total - free
    return sum(rank.memory_info().rss for rank in schedulers(server.process.pid))


def _no_memory(server: Server, folder: Path, values: Values) -> None:
    """Take all memory that is free, and update: refused or staged elsewhere, and served on."""
    streams = start_streams(server)
    before = served(server)
    taken = _take_all()
    values["taken_bytes"] = sum(piece.nbytes for piece in taken)
    body = {"model_path": str(folder / "v1"), "weight_version": "v1", **LIVE}
    answer: dict[str, Any] = server.post("/update_weights_from_disk", body)
    values["status_code"] = answer["status_code"]
    values["outcome"] = answer["staged_as"]["form"] if answer.get("success") else str(answer)[:300]
    more_tokens(list(streams))
    if not answer.get("success") and served(server) != before:
        raise AssertionError("the refused update has changed what is served")
    taken.clear()
    card.module().empty_cache()
    update(server, folder, 1, **LIVE)
    more_tokens(list(streams))
    expect_served(server, 1)
    values |= label_values(end_streams(streams))


def _take_all() -> list[torch.Tensor]:
    """Allocate the card's free memory, down to pieces of ``_PIECE`` bytes."""
    taken: list[torch.Tensor] = []
    size, _ = card.module().mem_get_info()
    while size >= _PIECE:
        with contextlib.suppress(torch.OutOfMemoryError):
            taken.append(torch.empty(size, dtype=torch.uint8, device=card.device()))
            continue
        size //= 2
    return taken


if __name__ == "__main__":
    main("memory", "Tokens of KV, release and resume, and no memory", PARTS, run)
