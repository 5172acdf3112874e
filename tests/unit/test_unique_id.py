"""NCCL's id as a trainer left it: read, and nothing is run for it."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.update.sources.unique_id import read_unique_id

ID = bytes(range(128))
VLLM = "vllm.distributed.device_communicators.pynccl_wrapper"


def named(monkeypatch: pytest.MonkeyPatch, name: str, size: int = 128) -> Any:
    """A structure in vLLM's module, as a trainer has it."""
    fields = [("internal", ctypes.c_byte * size)]
    structure = type(name, (ctypes.Structure,), {"_fields_": fields, "__module__": VLLM})
    for package in accumulate(VLLM.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    setattr(sys.modules[VLLM], name, structure)
    return structure


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_what_vllm_pickles(monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    content = pickle.dumps(named(monkeypatch, "ncclUniqueId").from_buffer_copy(ID), protocol)
    # it is not installed, and need not be
    monkeypatch.delitem(sys.modules, VLLM)
    assert read_unique_id(content) == ID


def test_what_a_copy_of_it_pickles() -> None:
    assert read_unique_id(pickle.dumps(ncclUniqueId.from_buffer_copy(ID))) == ID


class Runs:
    """Runs what it likes when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._call = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def test_nothing_is_run(tmp_path: Path) -> None:
    there = tmp_path / "it ran"
    content = pickle.dumps(Runs(os.mkdir, str(there)))
    with pytest.raises(Refused, match="no pickled ncclUniqueId"):
        read_unique_id(content)
    assert not there.exists()
    # else this test shows nothing
    pickle.loads(content)
    assert there.exists()


def test_other_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    other = pickle.dumps(named(monkeypatch, "Other")())
    with pytest.raises(Refused, match="another object"):
        read_unique_id(other)
    short = named(monkeypatch, "ncclUniqueId", size=64)
    with pytest.raises(Refused, match="64 bytes, not 128"):
        read_unique_id(pickle.dumps(short()))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"garbage", id="no pickle"),
        pytest.param(pickle.dumps(None), id="None"),
        pytest.param(pickle.dumps(ID), id="bytes"),
        pytest.param(pickle.dumps({"internal": ID}), id="dict"),
        pytest.param(pickle.dumps(ncclUniqueId())[:-20], id="cut off"),
        pytest.param(pickle.dumps([ncclUniqueId()]), id="list of one"),
        pytest.param(b"\x80\x04\x93.", id="named by nothing"),
        pytest.param(b"\x80\x04" + b"(" * 3000, id="long"),
    ],
)
def test_what_is_no_id(content: bytes) -> None:
    with pytest.raises(Refused, match="NCCL id"):
        read_unique_id(content)
