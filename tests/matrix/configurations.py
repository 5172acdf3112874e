"""The ways to run a server that the table has rows of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.server import Server, serve
from tests.support.nodes import nodes_environment, serve_nodes
from tests.support.plugins import with_plugin

FLAGS = ("--weight-version", "v0", "--enable-memory-saver")


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Configuration:
    """``name`` is what the user says, in the table."""

    name: str
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    # those that take part in a broadcast
    ranks: int = 1
    # of tensors, one for each tensor-parallel rank of each replica
    payloads: int = 1
    nodes: int = 1
    # further fields of each request
    request: Callable[[], dict[str, Any]] = _nothing
    # tokens at the start of an answer that another server has made
    foreign: int = 0

    def takers(self, source: str) -> int:
        """How many times a source sends what it sends."""
        return self.ranks if source.startswith("distributed") else self.payloads

    @contextlib.contextmanager
    def serve(self, model: Path, folder: Path, *more: str) -> Iterator[Server]:
        """``more`` are flags besides; logs are in ``folder``."""
        flags = (*FLAGS, *self.flags, *more)
        if self.nodes > 1:
            with serve_nodes(model, *flags, folder=folder, env=nodes_environment()) as nodes:
                yield nodes.first
            return
        with serve(model, *flags, log=folder / "log", env=self.env) as server:
            yield server


_rooms = itertools.count(1)


def _of_a_pair() -> dict[str, Any]:
    """SGLang's ``fake`` transfer stands in for the other server."""
    return {"bootstrap_host": "2.2.2.2", "bootstrap_room": next(_rooms)}


def named(word: str) -> Configuration:
    """The first whose name has ``word``."""
    for configuration in CONFIGURATIONS:
        if word in configuration.name:
            return configuration
    raise ValueError(f"no configuration is named like {word!r}")


CONFIGURATIONS = (
    Configuration("one rank"),
    Configuration("`--disable-overlap-schedule`", ("--disable-overlap-schedule",)),
    Configuration("`SGLANG_INFLIGHT_STAGING=off`", env={"SGLANG_INFLIGHT_STAGING": "off"}),
    Configuration("`--tp-size 2`", ("--tp-size", "2"), ranks=2, payloads=2),
    Configuration("`--dp-size 2`", ("--dp-size", "2"), ranks=2, payloads=2),
    Configuration(
        "attention DP, `--attn-dp-size 2`",
        ("--tp-size", "2", "--attn-dp-size", "2"),
        with_plugin("attention_dp"),
        ranks=2,
        payloads=2,
    ),
    Configuration("`--nnodes 2`, `--tp-size 2`", ranks=2, payloads=2, nodes=2),
    Configuration("`--pp-size 2`", ("--pp-size", "2"), ranks=2),
    Configuration(
        "`--pp-size 2 --tp-size 2`", ("--pp-size", "2", "--tp-size", "2"), ranks=4, payloads=2
    ),
    Configuration("`--tokenizer-worker-num 2`", ("--tokenizer-worker-num", "2")),
    Configuration(
        "`--speculative-algorithm NGRAM`",
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        with_plugin("speculation"),
    ),
    Configuration(
        "`--enable-hierarchical-cache`",
        (
            "--enable-hierarchical-cache",
            "--hicache-io-backend", "direct",
            "--hicache-mem-layout", "layer_first",
        ),
    ),
    Configuration("`--disable-radix-cache`", ("--disable-radix-cache",)),
    Configuration(
        "`--disaggregation-mode decode`",
        (
            "--disaggregation-mode", "decode",
            "--disaggregation-transfer-backend", "fake",
            "--disaggregation-decode-retraction-backup", "cpu_tensor",
        ),
        request=_of_a_pair,
        foreign=1,
    ),
)  # fmt: skip
