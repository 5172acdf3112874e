"""NCCL's id is read from a trainer's pickle, and nothing is run."""

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

from sglang_inflight.scheduler.groups.stateless_group import read_unique_id
from sglang_inflight.vocabulary.errors import Refused

ID = bytes(range(128))
VLLM = "vllm.distributed.device_communicators.pynccl_wrapper"


def named(monkeypatch: pytest.MonkeyPatch, name: str, size: int = 128) -> Any:
    """Define a structure in vLLM's module, like a trainer's."""
    fields = [("internal", ctypes.c_byte * size)]
    structure = type(name, (ctypes.Structure,), {"_fields_": fields, "__module__": VLLM})
    for package in accumulate(VLLM.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    setattr(sys.modules[VLLM], name, structure)
    return structure


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_vllm_unique_id_is_read(monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    content = pickle.dumps(named(monkeypatch, "ncclUniqueId").from_buffer_copy(ID), protocol)
    # vllm need not be installed
    monkeypatch.delitem(sys.modules, VLLM)
    assert read_unique_id(content) == ID


def test_copied_unique_id_class_is_read() -> None:
    assert read_unique_id(pickle.dumps(ncclUniqueId.from_buffer_copy(ID))) == ID


class Runs:
    """Runs a call when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._call = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def test_pickled_call_in_unique_id_is_not_run(tmp_path: Path) -> None:
    there = tmp_path / "it ran"
    content = pickle.dumps(Runs(os.mkdir, str(there)))
    with pytest.raises(Refused, match="no pickled ncclUniqueId"):
        read_unique_id(content)
    assert not there.exists()
    # without this run the test proves nothing
    pickle.loads(content)
    assert there.exists()


def test_other_structure_is_no_unique_id(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_malformed_unique_id_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="NCCL id"):
        read_unique_id(content)
