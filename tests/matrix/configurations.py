"""Configurations of a server, one for each row of the table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import marker
from harness.server import Server, serve
from tests.support import eagle, moe
from tests.support.load import Generation
from tests.support.nodes import nodes_environment, serve_nodes
from tests.support.pair import serve_pair
from tests.support.plugins import with_plugin

Generate = Callable[..., Generation]
FLAGS = ("--weight-version", "v0", "--enable-memory-saver")


@dataclass(frozen=True)
class Configuration:
    """A row of the table. ``name`` is the user's setting."""

    name: str
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    # ranks taking part in a broadcast, each with a payload of tensors
    ranks: int = 1
    nodes: int = 1
    # the served model
    model: marker.Model = marker
    # whether a draft model is added
    drafts: bool = False
    # a prefill server with a decode server
    pair: bool = False

    @contextlib.contextmanager
    def run(self, model: Path, folder: Path) -> Iterator[tuple[Sequence[Server], Generate]]:
        """Start the servers, and yield them with a function to start a request."""
        if self.pair:
            flags = (*FLAGS, *self.flags)
            with serve_pair(model, *flags, folder=folder) as pair:
                yield pair.servers, pair.generate
        else:
            with self.serve(model, folder) as server:
                yield (server,), functools.partial(Generation, server)

    @contextlib.contextmanager
    def serve(self, model: Path, folder: Path, *more: str) -> Iterator[Server]:
        """Start the server with further flags ``more``, and with logs in ``folder``."""
        assert not self.pair, "these are two servers"
        flags = (*FLAGS, *self.flags, *more)
        if self.drafts:
            draft = eagle.build(folder / "draft", agrees=True)
            flags = (*flags, "--speculative-draft-model-path", str(draft))
        if self.nodes > 1:
            with serve_nodes(model, *flags, folder=folder, env=nodes_environment()) as nodes:
                yield nodes.first
            return
        with serve(model, *flags, log=folder / "log", env=self.env) as server:
            yield server


def named(word: str) -> Configuration:
    """Return the first configuration with ``word`` in its name."""
    for configuration in CONFIGURATIONS:
        if word in configuration.name:
            return configuration
    raise ValueError(f"no configuration is named like {word!r}")


CONFIGURATIONS = (
    Configuration("one rank"),
    Configuration("`--disable-overlap-schedule`", ("--disable-overlap-schedule",)),
    Configuration("`SGLANG_INFLIGHT_STAGING=off`", env={"SGLANG_INFLIGHT_STAGING": "off"}),
    Configuration("`--tp-size 2`", ("--tp-size", "2"), ranks=2),
    Configuration("`--dp-size 2`", ("--dp-size", "2"), ranks=2),
    Configuration(
        "attention DP, `--attn-dp-size 2`",
        ("--tp-size", "2", "--attn-dp-size", "2"),
        with_plugin("attention_dp"),
        ranks=2,
    ),
    Configuration(
        "attention DP, `--enable-dp-attention-local-control-broadcast`",
        (
            "--tp-size", "2", "--attn-dp-size", "2",
            "--enable-dp-attention-local-control-broadcast",
        ),
        with_plugin("attention_dp"),
        ranks=2,
    ),
    Configuration(
        "mixture of experts, `--tp-size 2 --ep-size 2`",
        ("--tp-size", "2", "--ep-size", "2"),
        with_plugin("experts"),
        ranks=2,
        model=moe,
    ),
    Configuration(
        "the same with `--enable-eplb`, `SGLANG_INFLIGHT_STAGING=off`",
        (
            "--tp-size", "2", "--ep-size", "2",
            "--enable-eplb",
            "--ep-num-redundant-experts", "2",
            "--eplb-rebalance-num-iterations", "20",
            # otherwise SGLang measures time with CUDA events
            "--eplb-rebalance-layers-per-chunk", "1",
        ),
        with_plugin("experts") | {"SGLANG_INFLIGHT_STAGING": "off"},
        ranks=2,
        model=moe,
    ),
    Configuration("`--nnodes 2`, `--tp-size 2`", ranks=2, nodes=2),
    Configuration("`--pp-size 2`", ("--pp-size", "2"), ranks=2),
    Configuration(
        "`--pp-size 2 --tp-size 2`", ("--pp-size", "2", "--tp-size", "2"), ranks=4
    ),
    Configuration("`--tokenizer-worker-num 2`", ("--tokenizer-worker-num", "2")),
    Configuration(
        "`--speculative-algorithm NGRAM`",
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        with_plugin("speculation"),
    ),
    Configuration(
        "`--speculative-algorithm EAGLE`, with a draft model",
        (
            "--speculative-algorithm", "EAGLE",
            "--speculative-num-steps", "3",
            "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", "4",
            "--max-running-requests", "8",
        ),
        with_plugin("speculation") | {"TORCHDYNAMO_DISABLE": "1"},
        drafts=True,
    ),
    Configuration(
        "`--enable-hierarchical-cache`",
        (
            "--enable-hierarchical-cache",
            "--hicache-io-backend", "direct",
            "--hicache-mem-layout", "layer_first",
        ),
        with_plugin("host_memory"),
    ),
    Configuration(
        "`--dp-size 2 --tp-size 2`", ("--dp-size", "2", "--tp-size", "2"), ranks=4
    ),
    Configuration(
        "`--dp-size 2 --pp-size 2`", ("--dp-size", "2", "--pp-size", "2"), ranks=4
    ),
    Configuration(
        "`--dp-size 2 --tokenizer-worker-num 2`",
        ("--dp-size", "2", "--tokenizer-worker-num", "2"),
        ranks=2,
    ),
    Configuration(
        "`--dp-size 2 --enable-hierarchical-cache`",
        (
            "--dp-size", "2",
            "--enable-hierarchical-cache",
            "--hicache-io-backend", "direct",
            "--hicache-mem-layout", "layer_first",
        ),
        with_plugin("host_memory"),
        ranks=2,
    ),
    Configuration("`--disable-radix-cache`", ("--disable-radix-cache",)),
    Configuration(
        "`--disaggregation-mode prefill` and `decode`, both asked",
        ("--max-total-tokens", "65536"),
        pair=True,
    ),
)  # fmt: skip
