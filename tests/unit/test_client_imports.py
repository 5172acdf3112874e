"""The trainer's imports, without SGLang and without torch."""

from __future__ import annotations

import subprocess
import sys

from harness.starting import ROOT

VOCABULARY = ROOT / "sglang_inflight" / "vocabulary"

_CODE = """
import sys
for name in {without}:
    sys.modules[name] = None
import sglang_inflight.client
from sglang_inflight.client import {names}
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_client_imports_neither_sglang_nor_torch() -> None:
    program = "import sys, sglang_inflight.client; print({*sys.modules} & {'sglang', 'torch'})"
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert said.stdout == "set()\n"


def test_vocabulary_imports_neither_sglang_nor_torch() -> None:
    names = [f"sglang_inflight.vocabulary.{path.stem}" for path in VOCABULARY.glob("[!_]*.py")]
    assert "sglang_inflight.vocabulary.bodies" in names
    missing = "import sys; sys.modules.update(sglang=None, torch=None)"
    run(f"{missing}; import {', '.join(names)}")


def test_client_needs_neither_sglang_nor_torch() -> None:
    run(_CODE.format(without=("sglang", "torch"), names="Client, Fleet, Sender, read_spans"))


def test_digests_need_no_sglang() -> None:
    made = _CODE.format(without=("sglang",), names="digest, digests")
    run(
        made
        + 'import torch; assert digests({"w": torch.ones(2)})["w"] == digest(torch.ones(2), "w")'
    )


def test_sender_needs_no_sglang() -> None:
    made = _CODE.format(without=("sglang",), names="Client, Sender")
    run(made + 'with Client("http://127.0.0.1:1") as client: Sender(client)')
