"""Triton kernels: each equals its plain twin in Triton's interpreter, and compiles for cards."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sglang_inflight", "benchmarks")

# module and name of each kernel that a test of this file compares
COMPARED = {"sglang_inflight.scheduler.update.changes.exchange_kernel._exchange"}

# code for a process of its own: the interpreter takes the compiler's place when Triton is imported
EXCHANGE = """
import itertools
import torch
from sglang_inflight.scheduler.update.changes.encoding import BLOCK, PIECE, bits_of, find_changes
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.changes.exchange_kernel import Launch

LENGTHS = 1, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77
SHARES = 1.0, 0.6, 0.2, 0.002
DTYPES = torch.uint8, torch.bfloat16, torch.float32, torch.int64
torch.manual_seed(0)

def staged(weight, new, start):
    live = bits_of(weight)
    return live, find_changes(start, live[start:], bits_of(new)[start:])

def bits(length, dtype):
    # NaN payloads and signed zeros too
    return torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8).view(dtype)

weights, news, starts = [], [], []
for length, share, dtype in itertools.product(LENGTHS, SHARES, DTYPES):
    weight = bits(length, dtype)
    new = weight.clone()
    chosen = torch.rand(length) < share
    bits_of(new)[chosen] ^= 1
    weights.append(weight)
    news.append(new)
    starts.append(length // 3)
ours = [weight.clone() for weight in weights]
theirs = [weight.clone() for weight in weights]
kernel = [staged(*one) for one in zip(ours, news, starts)]
plain = [staged(*one) for one in zip(theirs, news, starts)]
kernel = [(live, part) for live, part in kernel if part is not None]
kinds = {(part.offsets is None, part.values.dtype) for _, part in kernel}
assert len(kinds) == 2 * len(DTYPES), kinds
launch = Launch([(live, [part]) for live, part in kernel], torch.device("cpu"))
exchange = Exchange([(w, [p]) for w, (_, p) in zip(theirs, plain) if p is not None])

def check(expected):
    for one, other, wanted, start in zip(ours, theirs, expected, starts):
        assert torch.equal(bits_of(one), bits_of(other))
        assert torch.equal(bits_of(one)[start:], bits_of(wanted)[start:])
    for (_, one), (_, other) in zip(kernel, (both for both in plain if both[1] is not None)):
        assert torch.equal(one.values, other.values)

check(weights)
for expected in (news, weights, news):
    launch()
    exchange.make()
    check(expected)
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_inflight.scheduler.update.changes import exchange_kernel as kernels

for capability in (80, 90, 100):
    for width, of_width in kernels._WIDTHS.items():
        source = ASTSource(
            fn=kernels._exchange,
            signature={"table": "*i64", "TYPE": "constexpr", "TILE": "constexpr"},
            constexprs={"TYPE": of_width, "TILE": kernels._TILE},
            attrs={(0,): [["tt.divisibility", 16]]},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        # two threads with one element would race: each reads it and writes it
        assert 32 * compiled.metadata.num_warps <= kernels._TILE
"""


def kernels() -> Iterator[str]:
    """Yield module and name of each function that Triton compiles."""
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            if "triton" not in source:
                continue
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and any(
                    "triton" in ast.unparse(one) for one in node.decorator_list
                ):
                    yield f"{module}.{node.name}"


def run(script: str, **env: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_every_kernel_is_compared_with_a_plain_twin() -> None:
    assert set(kernels()) == COMPARED


def test_exchange_equals_its_plain_twin() -> None:
    run(EXCHANGE, TRITON_INTERPRET="1")


def test_exchange_compiles_for_cards(tmp_path: Path) -> None:
    """Triton brings NVIDIA's assembler, which needs no card."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no compiler for cards")
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
