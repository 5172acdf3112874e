"""An adapter's folder with a file that would hold or fill a scheduler reaches no scheduler."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.extensions.adapters import loading
from sglang_inflight.extensions.adapters.folder import refuse_irregular
from sglang_inflight.extensions.adapters.messages import LoadAdapter
from tests.support import lora

MAKE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to /dev/zero": lambda path: os.symlink("/dev/zero", path),
    "too large": lambda path: path.write_bytes(b" " * (5 << 20)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(("adapter_config.json", "added_tokens.json"), MAKE),
        *itertools.product(("more.safetensors",), ("pipe", "folder", "link to /dev/zero")),
    ],
)
def test_file_that_must_not_be_read_is_refused_before_a_rank_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = lora.write(tmp_path / "adapter", lora.tensors(0))
    refuse_irregular(str(folder))
    (folder / name).unlink(missing_ok=True)
    MAKE[kind](folder / name)
    monkeypatch.setattr(
        loading, "get_lora", lambda: SimpleNamespace(max_loaded_loras=None, enable_lora=True)
    )
    adapters = SimpleNamespace(reload=None)
    frontend = SimpleNamespace(part=lambda _: adapters)
    manager: Any = SimpleNamespace(inflight=frontend, is_pause=False)
    request: Any = LoadAdapter(
        lora_name="a", lora_path=str(folder), adapter="a", adapter_version="1"
    )

    async def load(*args: Any) -> Any:
        raise AssertionError("a rank would read it")

    answer = asyncio.run(loading.load_everywhere(load, manager, request))
    assert not answer.success
    assert name in answer.error_message


def test_linked_files_and_names_of_the_hub_pass(tmp_path: Path) -> None:
    folder = lora.write(tmp_path / "blobs", lora.tensors(0))
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    refuse_irregular(str(linked))
    refuse_irregular("someone/adapter")
    refuse_irregular(None)
