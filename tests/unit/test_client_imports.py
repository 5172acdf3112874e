"""The trainer's imports, without SGLang and without torch."""

from __future__ import annotations

import subprocess
import sys

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


def test_client_needs_neither_sglang_nor_torch() -> None:
    run(_CODE.format(without=("sglang", "torch"), names="Client, Fleet, Sender, read_spans"))


def test_sender_needs_no_sglang() -> None:
    made = _CODE.format(without=("sglang",), names="Client, Sender")
    run(made + 'with Client("http://127.0.0.1:1") as client: Sender(client)')
