"""Models that SGLang finishes after loading, updated while 16 streams decode: MLA and block FP8."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.card import has_gpu, is_glass
from benchmarks.gpu.marked import IN_BLOCKS
from benchmarks.gpu.servers import (
    digest,
    end_streams,
    expect_graphs,
    label_values,
    serving,
    start_streams,
    started,
)
from benchmarks.gpu.step import Step, Values, main
from harness.server import Server
from tests.support import block_fp8, mla
from tests.support.load import more_tokens, status, update, versions_of
from tests.support.updates import succeed

LIMIT_S = 90
# the tiny models show a torn update by KV of another version, too
KEEP = {"non_blocking": True, "kv_cache": "keep"}


class Kind(NamedTuple):
    """A model, and how its server starts. Off a GPU a plugin stands in for kernels."""

    build: Callable[[Path, int], Path]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = {}


def _kinds() -> dict[str, Kind]:
    if has_gpu():
        # DeepGEMM would compile for minutes, and kernels of SGLang take blocks of 128 by 128
        return {
            "MLA": Kind(mla.build, ("--attention-backend", "triton")),
            "block FP8": Kind(IN_BLOCKS.build, ("--fp8-gemm-backend", "triton")),
        }
    # the glass card has attention of its own, with both forms of a prompt
    on_a_cpu = ("--attention-backend", "torch_native"), mla.ENV
    return {
        "MLA": Kind(mla.build) if is_glass() else Kind(mla.build, *on_a_cpu),
        "block FP8": Kind(block_fp8.build, env=block_fp8.ENV),
    }


PARTS = ("MLA", "block FP8")


def run(step: Step) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = {}
        for part, kind in _kinds().items():
            for version in range(3):
                kind.build(folder / part / f"v{version}", version)
            starts[part] = functools.partial(
                serving,
                folder / part / "v0",
                *kind.flags,
                log=step.logs / f"{part}.log",
                env={**kind.env, "SGLANG_INFLIGHT_STAGING": "changes"},
            )
        with started(starts) as server_of:
            for part in PARTS:
                with step.part(part) as values, server_of(part) as server:
                    _update(server, folder / part, values)


def _update(server: Server, folder: Path, values: Values) -> None:
    streams = start_streams(server)
    digests: dict[int, str] = {}
    expected = ["v0"]
    for version in (1, 2, 1):
        receipt = update(server, folder, version, **KEEP)
        if receipt["held_s"] or receipt["staged_as"]["form"] != "changes":
            raise AssertionError(f"not staged: {receipt['staged_as']}")
        values["stall_ms"] = receipt["stall_ms"]
        if digests.setdefault(version, digest(server)) != digest(server):
            raise AssertionError(f"v{version} has another digest than before")
        more_tokens(list(streams))
        expected.append(f"v{version}")
    succeed(server.post("/inflight/rollback", {"kv_cache": "keep"}))
    more_tokens(list(streams))
    expected.append("v2")
    expect_graphs(server)
    outputs = end_streams(streams)
    values |= label_values(outputs)
    values["proof"] = status(server)["staging"]["proof"]["state"]
    for output in outputs:
        if versions_of(output) != expected:
            raise AssertionError(f"a stream has the versions {versions_of(output)}")


if __name__ == "__main__":
    main("finished", "Models finished after loading", PARTS, run)
