"""Bodies of SGLang's routes are decoded to SGLang's values."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers import io_struct

from sglang_inflight.frontend.as_sglang import decode, sglangs_class
from sglang_inflight.plugin import every_hook
from sglang_inflight.vocabulary import bodies, sparse
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import Refused

# fields required by SGLang, of each body
WHOLE: dict[type[Body], dict[str, Any]] = {
    bodies.PauseBody: {},
    bodies.ContinueBody: {},
    bodies.DiskBody: {"model_path": "/there"},
    bodies.TensorBody: {"serialized_named_tensors": ["QUJD"]},
    bodies.DistributedBody: {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]},
    bodies.IPCBody: {"zmq_handles": {}},
    bodies.BeginBody: {},
    bodies.EndBody: {},
    bodies.JoinGroupBody: {
        "master_address": "h", "master_port": 29500, "rank_offset": 1, "world_size": 2
    },
    bodies.LeaveGroupBody: {},
    bodies.NameBody: {"new_version": "v1"},
    bodies.LoadFolderBody: {"lora_name": "a", "lora_path": "/there"},
    bodies.LoadTensorsBody: {
        "lora_name": "a", "config_dict": {}, "serialized_named_tensors": ["QUJD"]
    },
    bodies.UnloadAdapterBody: {"lora_name": "a"},
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    "33150", " 7 ", "7.0", "1e2", "0x1f", "1_0", "nan", 7, 7.0, 7.5, True, False, 0, 1, 2,
    "true", "False", "on", "off", "yes", "n", "1", "0", "null", None, [], {}, ["1", 2.0],
    [["1", 2.0]], "direct", "target", "in_place", "QUJD", ["QUJD"], {"a": "b"}, {"a": 1},
)  # fmt: skip
OURS = (bodies.SealBody, bodies.AbortUpdateBody, bodies.RollbackBody)


def sglangs(shape: type[Body]) -> type[msgspec.Struct]:
    theirs = sglangs_class(shape)
    assert theirs is not None
    return theirs


def fields_of_sglang(shape: type[Body]) -> list[str]:
    names = {field.name for field in msgspec.structs.fields(sglangs(shape))}
    return sorted(names - {"rid", "http_worker_ipc"})


def read(shape: type[Body], body: dict[str, Any]) -> Body:
    return decode(json.dumps(body).encode(), shape)


@pytest.mark.parametrize("shape", WHOLE)
def test_field_values_equal_sglangs(shape: type[Body]) -> None:
    """Refusing more (ports, empty names) and keeping a value unconverted are allowed."""
    adapter = TypeAdapter(sglangs(shape))
    for name in fields_of_sglang(shape):
        for value in VALUES:
            body = {**WHOLE[shape], name: value}
            try:
                ours = getattr(read(shape, body), name)
            except Refused:
                continue
            try:
                theirs = getattr(adapter.validate_python(body), name)
            except ValidationError:
                theirs = value
            assert ours == theirs, (name, value)
            assert type(ours) is type(theirs), (name, value)


@pytest.mark.parametrize("shape", WHOLE)
def test_bool_field_accepts_every_spelling(shape: type[Body]) -> None:
    for field in msgspec.structs.fields(sglangs(shape)):
        if field.type is bool:
            for value in ("true", "False", "on", "off", "yes", "n", "1", "0", 1, 0, 1.0):
                theirs = TypeAdapter(bool).validate_python(value)
                assert (
                    getattr(read(shape, {**WHOLE[shape], field.name: value}), field.name) is theirs
                )


@pytest.mark.parametrize("shape", WHOLE)
def test_body_has_every_sglang_field(shape: type[Body]) -> None:
    assert set(fields_of_sglang(shape)) <= set(shape.__struct_fields__)


@pytest.mark.parametrize("content", [b"", b"{}"])
def test_missing_field_is_named(content: bytes) -> None:
    with pytest.raises(Refused, match="`model_path`"):
        decode(content, bodies.DiskBody)


def test_framework_body_is_accepted() -> None:
    join = {**WHOLE[bodies.JoinGroupBody], "master_port": "33150", "pp_rank": 3}
    body = read(bodies.JoinGroupBody, join)
    assert isinstance(body, bodies.JoinGroupBody)
    assert body.master_port == 33150


@pytest.mark.parametrize("shape", WHOLE)
def test_unknown_field_warns_once(shape: type[Body], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read(shape, {**WHOLE[shape], "surprise": 1})
    assert len([record for record in caplog.records if "surprise" in record.message]) == 1


@pytest.mark.parametrize(
    ("shape", "field"), [(bodies.PauseBody, "timeout"), (bodies.TensorBody, "session")]
)
def test_misspelt_field_beside_ours_is_refused(shape: type[Body], field: str) -> None:
    """A client without our fields gets the misspelt field ignored."""
    read(shape, {**WHOLE[shape], field: 1})
    for another in ({"timeout_s": 1.0}, {"timeout_s": None}):
        with pytest.raises(Refused, match=f"`{field}`"):
            read(shape, {**WHOLE[shape], field: 1, **another})


@pytest.mark.parametrize("shape", OURS)
def test_unknown_field_of_our_routes_is_refused(shape: type[Body]) -> None:
    with pytest.raises(Refused, match="surprise"):
        read(shape, {"surprise": 1})


@pytest.mark.parametrize("value", ["3", True, "inf", "null"])
def test_our_fields_are_not_converted(value: Any) -> None:
    with pytest.raises(Refused, match="lease_s"):
        read(bodies.PauseBody, {"lease_s": value})


def test_recapture_cuda_graph_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    bodies._warn_that_graphs_stay.cache_clear()
    for _ in range(2):
        read(bodies.DiskBody, {**WHOLE[bodies.DiskBody], "recapture_cuda_graph": True})
    (said,) = [r.message for r in caplog.records if "recapture_cuda_graph" in r.message]
    assert "recapture_cuda_graph is ignored" in said


def test_empty_weight_version_keeps_the_name() -> None:
    """SGLang accepts an empty name, but versions are known by name."""
    body = {**WHOLE[bodies.DiskBody], "weight_version": ""}
    made = read(bodies.DiskBody, body)
    assert isinstance(made, bodies.DiskBody)
    assert made.weight_version is None


@pytest.mark.parametrize("name", ["a\nb", "\0", "\x1b[0m", "v" * 257, "\ud800"])
def test_unprintable_version_is_refused(name: str) -> None:
    """An Engine builds bodies without decoding them, and refuses the same names."""
    for make in (
        lambda: bodies.DiskBody(model_path="/there", weight_version=name),
        lambda: bodies.EndBody(weight_version=name),
        lambda: bodies.RollbackBody(weight_version=name),
        lambda: bodies.NameBody(new_version=name),
        lambda: bodies.LoadFolderBody(lora_name="a", lora_path="/there", adapter_version=name),
    ):
        with pytest.raises(Refused, match="printable"):
            make()


@pytest.mark.parametrize("name", ["a\nb", "a\u202eb", "a\0b"])
def test_unprintable_name_of_anything_new_is_refused(name: str) -> None:
    rendezvous: dict[str, Any] = {
        "master_address": "there",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
    }
    for make in (
        lambda: bodies.PauseBody(new_id=name),
        lambda: bodies.BeginBody(new_id=name),
        lambda: bodies.JoinGroupBody(group_name=name, **rendezvous),
        lambda: bodies.LoadFolderBody(lora_name=name, lora_path="/there"),
        lambda: bodies.LoadTensorsBody(lora_name=name, config_dict={}, serialized_named_tensors=[]),
        lambda: sparse.Manifest(
            format="sglang-inflight-sparse", format_version=1, base_version=name, files={}
        ),
    ):
        with pytest.raises(Refused, match="printable"):
            make()


def test_version_in_any_language_is_accepted() -> None:
    for name in ("v" * 256, "größer als β", "第二步"):
        assert bodies.EndBody(weight_version=name).weight_version == name


def test_each_body_names_a_class_of_sglang() -> None:
    """Also the bodies that only one module reads, imported with the hooks."""
    every_hook()
    shapes: list[type[Body]] = [Body]
    for shape in shapes:
        shapes += shape.__subclasses__()
        if shape.sglang is not None:
            assert sglangs_class(shape) is getattr(io_struct, shape.sglang)
    assert len(shapes) > 20
