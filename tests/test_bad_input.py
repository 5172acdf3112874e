"""Bad input of any kind gets a 4xx with a sentence, and changes nothing."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from harness import marker
from harness.server import Server
from harness.trainer import layout
from sglang_inflight.vocabulary.calls import TABLE
from tests.support.load import ENDLESS, Generation, start_running
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.routes import routes
from tests.support.updates import V1, by_value

pytest_plugins = ["tests.support.fixtures"]

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
DISTRIBUTED, IPC = "/update_weights_from_distributed", "/update_weights_from_ipc"
BEGIN, END, ABORT = "/begin_weight_update", "/end_weight_update", "/abort_weight_update"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
PAUSE, CONTINUE, ROLLBACK = "/pause_generation", "/continue_generation", "/inflight/rollback"
NAME = "/update_weight_version"
# path -> whether SGLang has this call, too
POSTED = {
    call.path: call.is_sglangs
    for call in TABLE.values()
    if call.path is not None and call.method == "POST"
}


class Untouched:
    """Sends bad input and checks that the server refuses it unchanged."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client = httpx.Client(base_url=server.url, timeout=60)
        self._stream = self._start()
        self._before = self._serving()

    def refuse(
        self,
        path: str,
        body: Any,
        *words: str,
        status_codes: tuple[int, ...] = (400,),
        longest: int = 10_000,
    ) -> None:
        status_code, message = self.post(path, body)
        assert status_code in status_codes, (status_code, message)
        for word in words:
            assert word in message, message
        assert "Traceback" not in message
        assert len(message) <= longest
        self.check()

    def refuse_update(self, path: str, body: dict[str, Any], *words: str) -> None:
        """Refuse the body as an update of its own, and as a piece of a session."""
        self.refuse(path, {**V1, **body}, *words)
        self.begin()
        self.refuse(path, {**V1, **body}, *words)
        self.refuse(END, {}, "no weight-update session is open")

    def begin(self) -> None:
        assert self.post(BEGIN, {})[0] == 200

    def check(self) -> None:
        assert self.server.is_alive()
        assert self._serving() == self._before

    def check_stream(self) -> None:
        """Check that the long-running request continues on the old weights."""
        self._stream.wait_for_tokens(self._stream.count + 2)
        assert set(self._stream.tokens) == {marker.token(0)}
        if self._stream.count > ENDLESS // 2:
            self._stream.disconnect()
            self._stream = self._start()

    def close(self) -> None:
        # a failed test's open session would take in later updates
        self.post(ABORT, {})
        self._stream.disconnect()
        self._client.close()

    def _start(self) -> Generation:
        (stream,) = start_running(self.server, 1, tokens=ENDLESS)
        return stream

    def post(self, path: str, body: Any) -> tuple[int, str]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self._client.post(path, content=content)
        return response.status_code, response.json().get("message", response.text)

    def _serving(self) -> dict[str, Any]:
        status = self._client.get("/inflight/status").json()
        served = {name: status[name] for name in ("weight_version", "epoch", "digest", "paused")}
        return {**served, "staging": status["staging"]["state"]}


@pytest.fixture(scope="module")
def servers(pool: ServerPool) -> Iterator[dict[str, Untouched]]:
    """The module's server under "now". Restoring it is needless while tests pass."""
    servers: dict[str, Untouched] = {}
    yield servers
    for untouched in servers.values():
        untouched.close()
    pool.restore()


@pytest.fixture
def untouched(pool: ServerPool, servers: dict[str, Untouched]) -> Iterator[Untouched]:
    if "now" not in servers:
        servers["now"] = Untouched(pool.get(FLAVOURS["server"]))
    yield servers["now"]
    try:
        servers["now"].check()
        servers["now"].check_stream()
    except BaseException:
        servers.pop("now").close()
        pool.restore()
        raise


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of checkpoint v1 for a test to spoil."""
    return Path(shutil.copytree(checkpoints / "v1", tmp_path / "v1"))


# ---- bodies ------------------------------------------------------------------------------


def test_malformed_body_is_refused_by_every_route(untouched: Untouched) -> None:
    ours = {route.path for route in routes(untouched.server)}
    posted = {path: is_sglangs for path, is_sglangs in POSTED.items() if path in ours}
    for path in posted:
        untouched.refuse(path, b"\xff\x00garbage", "bad request body")
        untouched.refuse(path, b'{"mode": ', "bad request body")
        untouched.refuse(path, [1, 2], "bad request body", "object")
        untouched.refuse(path, "in_place", "bad request body", "object")
    for path in (path for path, is_sglangs in posted.items() if not is_sglangs):
        untouched.refuse(path, {"surprise": 1}, "`surprise`")


def test_sglang_routes_ignore_unknown_fields_and_read_quoted_numbers(untouched: Untouched) -> None:
    odd = {"surprise": 1, "pp_rank": 0}
    for path in (DISK, TENSOR, DISTRIBUTED, IPC):
        body = {**whole_body(path), **V1, **odd, "flush_cache": "no"}
        status_code, message = untouched.post(path, body)
        assert status_code == 400, (path, message)
        for field in ("surprise", "pp_rank", "flush_cache"):
            assert field not in message
    # the rank's place is the only error
    body = {**whole_body(JOIN), **odd, "master_port": "29999", "rank_offset": "0"}
    untouched.refuse(JOIN, body, "rank 0")
    assert untouched.post(BEGIN, {**odd, "non_blocking": True})[0] == 200
    assert untouched.post(ABORT, {})[0] == 200


@pytest.mark.parametrize(
    ("path", "field", "meant", "another"),
    [
        (PAUSE, "lease", "lease_s", {"timeout_s": 1}),
        (DISK, "non_blockng", "non_blocking", {"on_busy": "refuse"}),
        (END, "weight_versions", "weight_version", {"non_blocking": True}),
    ],
)
def test_misspelt_field_of_ours_is_refused(
    untouched: Untouched, path: str, field: str, meant: str, another: dict[str, Any]
) -> None:
    """SGLang has no similar field, so the caller meant ours."""
    body = {**whole_body(path), field: 1, **another}
    untouched.refuse(path, body, f"`{field}`", f"`{meant}`")


@pytest.mark.parametrize(
    "name", ["two\nlines", "nul\0", "\x1b[31mred", "\ud800", "v" * 257], ids=ascii
)
def test_version_name_with_control_characters_or_too_long_is_refused(
    untouched: Untouched, name: str
) -> None:
    """Each chunk of each answer repeats the name, and so do the logs."""
    for path in (DISK, TENSOR, DISTRIBUTED, IPC, END, ROLLBACK):
        untouched.refuse(path, {**whole_body(path), "weight_version": name})
    untouched.refuse(NAME, {"new_version": name})


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (DISK, "model_path"),
        (TENSOR, "serialized_named_tensors"),
        (DISTRIBUTED, "names"),
        (IPC, "zmq_handles"),
        (JOIN, "master_address"),
    ],
)
def test_empty_body_is_refused_with_the_missing_field(
    untouched: Untouched, path: str, field: str
) -> None:
    untouched.refuse(path, b"", f"`{field}`")
    untouched.refuse(path, b"{}", f"`{field}`")


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [
        (PAUSE, "mode", ["gently", 1, None]),
        (PAUSE, "lease_s", [0, -1, "soon", True]),
        (PAUSE, "timeout_s", [-0.5, [], {}]),
        (PAUSE, "pause_id", ["", 5]),
        (CONTINUE, "pause_id", ["", 5]),
        (BEGIN, "lease_s", [0, -1, "soon"]),
        (BEGIN, "selector", ["both", 1]),
        (BEGIN, "on_busy", ["cry"]),
        (BEGIN, "expected_version", [7, ""]),
        (END, "weight_version", [7, ""]),
        (END, "kv_cache", ["flush"]),
        (ROLLBACK, "weight_version", [7, ["v1"]]),
        (ROLLBACK, "kv_cache", ["flush"]),
        (JOIN, "master_port", [0, 70000, "http"]),
        (JOIN, "world_size", [1, -3]),
        (JOIN, "rank_offset", [-1]),
        (LEAVE, "group_name", ["", 3]),
        *(
            (path, field, values)
            for path in (DISK, TENSOR, DISTRIBUTED, IPC)
            for field, values in (
                ("weight_version", [5, {"v": 1}]),
                ("timeout_s", [0, -2, "long"]),
                ("kv_cache", ["flush"]),
                ("on_busy", ["cry"]),
                ("partial", ["yes"]),
                ("non_blocking", [1]),
            )
        ),
    ],
)
def test_field_of_a_wrong_type_is_named(
    untouched: Untouched, path: str, field: str, values: list[Any]
) -> None:
    for value in values:
        untouched.refuse(path, {**whole_body(path), field: value}, f"`$.{field}`")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    ("path", "field"), [(PAUSE, "lease_s"), (BEGIN, "lease_s"), (DISK, "timeout_s")]
)
def test_time_that_is_not_finite_is_refused(
    untouched: Untouched, path: str, field: str, number: bytes
) -> None:
    body = json.dumps({**whole_body(path), field: "number"}).encode()
    untouched.refuse(path, body.replace(b'"number"', number), "bad request body")


def whole_body(path: str) -> dict[str, Any]:
    """Return a body for ``path`` without an error in the body itself."""
    bodies: dict[str, dict[str, Any]] = {
        DISK: {"model_path": "/nowhere"},
        TENSOR: {"serialized_named_tensors": [by_value([("nowhere", torch.ones(1))])]},
        DISTRIBUTED: {"names": [], "dtypes": [], "shapes": []},
        IPC: {"zmq_handles": {}},
        NAME: {},
        JOIN: {
            "master_address": "127.0.0.1",
            "master_port": 29999,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        },
    }
    return bodies.get(path, {})


# ---- checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "no file in the folder"])
def test_missing_checkpoint_is_refused(untouched: Untouched, tmp_path: Path, there: bool) -> None:
    path = tmp_path / "gone"
    if there:
        path.mkdir()
    untouched.refuse_update(DISK, {"model_path": str(path)}, str(path))


def test_checkpoint_of_another_architecture_is_refused(untouched: Untouched, folder: Path) -> None:
    config = {**marker.CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    untouched.refuse_update(
        DISK, {"model_path": str(folder)}, "LlamaForCausalLM", "Qwen3ForCausalLM"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 1e6}, ("rope_theta is 1000000.0 there", "10000.0 here")),
        ({"rms_norm_eps": 0.1}, ("rms_norm_eps is 0.1 there", "1e-06 here")),
        ({"num_hidden_layers": 2}, ("num_hidden_layers is 2 there",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
    ],
)
def test_checkpoint_of_another_computation_is_refused(
    untouched: Untouched, folder: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    (folder / "config.json").write_text(json.dumps({**marker.CONFIG, **change}))
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "config.json", *words)


def test_config_of_invalid_json_is_refused(untouched: Untouched, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "config.json")


@pytest.mark.parametrize("kind", [5, "Qwen3ForCausalLM", [5], {"a": 1}, True])
def test_config_architectures_of_a_wrong_type_are_refused(
    untouched: Untouched, folder: Path, kind: Any
) -> None:
    (folder / "config.json").write_text(json.dumps({**marker.CONFIG, "architectures": kind}))
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "architectures", "list of names")


def test_oversized_config_is_refused(untouched: Untouched, folder: Path) -> None:
    os.truncate(folder / "config.json", 2 << 30)
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "config.json", "at most")


def test_config_without_an_object_is_refused(untouched: Untouched, folder: Path) -> None:
    (folder / "config.json").write_text("[" * 50_000)
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "config.json")
    (folder / "config.json").write_text("[1]")
    untouched.refuse_update(DISK, {"model_path": str(folder)}, "config.json", "object")


@pytest.mark.parametrize("file", ["model-2.safetensors", "config.json", "model.safetensors"])
def test_named_pipe_in_a_checkpoint_is_refused(
    untouched: Untouched, folder: Path, file: str
) -> None:
    """Opening a named pipe blocks until somebody writes to the pipe."""
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    untouched.refuse_update(DISK, {"model_path": str(folder)}, file, "no regular file")


def test_tensor_in_two_files_is_refused(untouched: Untouched, folder: Path) -> None:
    save_file(marker.tensors(2), folder / "old.safetensors")
    words = ("model.safetensors", "old.safetensors", "is in")
    untouched.refuse_update(DISK, {"model_path": str(folder)}, *words)


@pytest.mark.parametrize(
    "load_format",
    ["npcache", "dummy", "private", "sharded_state", "gguf", "layered", "remote", "flash_rl", ""],
)
def test_unsupported_load_format_is_refused(
    untouched: Untouched, folder: Path, load_format: str
) -> None:
    before = sorted(folder.rglob("*"))
    body = {"model_path": str(folder), "load_format": load_format}
    untouched.refuse_update(DISK, body, "load_format", repr(load_format), "safetensors")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["/" + "x" * 100_000, "x\0y", "/x" * 100_000], ids=range(3))
def test_impossible_path_is_refused_briefly(untouched: Untouched, path: str) -> None:
    body = {**V1, "model_path": path}
    untouched.refuse(DISK, body, "model_path", "is not a directory", longest=600)


@pytest.mark.parametrize("kept", [0, 5, 3000, -100])
def test_truncated_checkpoint_is_refused(untouched: Untouched, folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    untouched.refuse_update(DISK, {"model_path": str(folder)}, str(folder))


def test_missing_shard_is_named(untouched: Untouched, tmp_path: Path) -> None:
    folder = marker.build(tmp_path / "v1", 1, shards=3)
    lost = "model-00002-of-00003.safetensors"
    (folder / lost).unlink()
    untouched.refuse_update(DISK, {"model_path": str(folder)}, lost)


# ---- tensors -----------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"
HEAD = "lm_head.weight"
KNOWN = marker.tensors(1)


@dataclass(frozen=True)
class Spoilt:
    """A change to a valid set of tensors, and the words expected in the error."""

    spoil: Callable[[dict[str, torch.Tensor]], None]
    words: tuple[str, ...]


def _replace(name: str, tensor: torch.Tensor, *words: str) -> Spoilt:
    return Spoilt(lambda weights: weights.update({name: tensor}), (name, *words))


SPOILT = {
    "rows": _replace(UP, KNOWN[UP][:-1], "[127, 64]"),
    "rows of the head": _replace(HEAD, KNOWN[HEAD][:-8], "[1016, 64]"),
    "columns": _replace(HEAD, KNOWN[HEAD][:, :-8].contiguous(), "[1024, 56]"),
    "one row too many": _replace("model.norm.weight", torch.ones(65), "[65]"),
    "transposed": _replace(UP, KNOWN[UP].T.contiguous(), "[64, 128]"),
    "scalar": _replace("model.norm.weight", torch.tensor(1.0)),
    "no element": _replace("model.norm.weight", torch.ones(0)),
    "int64": _replace(UP, KNOWN[UP].long(), "int64"),
    "bool": _replace(HEAD, KNOWN[HEAD].bool(), "bool"),
    "NaN": _replace(UP, KNOWN[UP].clone().index_fill_(0, torch.tensor(7), float("nan")), "NaN"),
    "infinity": _replace(HEAD, KNOWN[HEAD] * float("inf"), "infinity"),
    "unknown name": _replace("model.layers.0.mlp.no_proj.weight", KNOWN[UP]),
    "unknown layer": _replace("model.layers.99.mlp.up_proj.weight", KNOWN[UP]),
    "empty name": _replace("", KNOWN[UP], "''"),
}


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("source", ["disk", "tensor"])
def test_bad_tensor_is_refused(untouched: Untouched, folder: Path, source: str, kind: str) -> None:
    weights = marker.tensors(1)
    SPOILT[kind].spoil(weights)
    if source == "disk":
        save_file(weights, folder / "model.safetensors")
        untouched.refuse_update(DISK, {"model_path": str(folder)}, *SPOILT[kind].words)
    else:
        body = {"serialized_named_tensors": [by_value(weights)]}
        untouched.refuse_update(TENSOR, body, *SPOILT[kind].words)


# ---- payloads ----------------------------------------------------------------------------


class Malice:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/inflight-test-was-here",)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


GOOD = by_value(marker.tensors(1))


class Loop:
    """A payload of a hundred bytes that holds the interpreter for minutes."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return list, (itertools.repeat(0, 2_000_000_000),)


PAYLOADS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "not base64": (["%%%"], ("serialized_named_tensors",)),
    "not text": ([5], ("serialized_named_tensors",)),
    "not a pickle": ([_encode(b"garbage")], ("serialized_named_tensors", "unpickled")),
    "nothing": ([""], ("serialized_named_tensors", "unpickled")),
    "cut off": ([_encode(base64.b64decode(GOOD)[:-50])], ("serialized_named_tensors", "unpickled")),
    "endless": ([_encode(pickle.dumps(Loop()))], ("serialized_named_tensors", "list")),
    "forbidden": ([_encode(pickle.dumps(Malice()))], ("serialized_named_tensors", "system")),
    "not a list": ([_encode(pickle.dumps({"a": 1}))], ("serialized_named_tensors", "dict")),
    "not pairs": ([by_value([1, 2])], ("serialized_named_tensors", "pairs")),
    "not tensors": ([by_value([("a", 1)])], ("tensor", "int")),
    "not names": ([by_value([(1, torch.ones(1))])], ("name", "int")),
    "no payload": ([], ("serialized_named_tensors", "0 payloads")),
    "too many payloads": ([GOOD, GOOD], ("serialized_named_tensors", "2 payloads")),
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_bad_payload_is_refused(untouched: Untouched, kind: str) -> None:
    payloads, words = PAYLOADS[kind]
    untouched.refuse(TENSOR, {**V1, "serialized_named_tensors": payloads}, *words)
    assert not Path("/tmp/inflight-test-was-here").exists()


@pytest.mark.parametrize(
    "content", [{"metadata": []}, [1, 2], {"flattened_tensor": 1, "metadata": [1]}]
)
def test_bad_flattened_bucket_is_refused(untouched: Untouched, content: Any) -> None:
    body = {
        "serialized_named_tensors": [_encode(pickle.dumps(content))],
        "load_format": "flattened_bucket",
    }
    untouched.refuse_update(TENSOR, body, "flattened_bucket")


@pytest.mark.parametrize("path", [DISK, TENSOR, DISTRIBUTED])
def test_unknown_load_format_is_refused(untouched: Untouched, checkpoints: Path, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        DISK: {"model_path": str(checkpoints / "v1")},
        TENSOR: {"serialized_named_tensors": [GOOD]},
        DISTRIBUTED: layout(1),
    }
    body = {**bodies[path], "load_format": "os.system"}
    untouched.refuse_update(path, body, "load_format", "os.system")


# ---- distributed and checkpoint engine ---------------------------------------------------


def test_unknown_group_is_refused(untouched: Untouched) -> None:
    body = {**layout(1), "group_name": "strangers"}
    untouched.refuse_update(DISTRIBUTED, body, "'strangers'", "/init_weights_update_group")
    untouched.refuse(LEAVE, {"group_name": "strangers"}, "'strangers'")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["a"]}, ("names", "one length")),
        ({"dtypes": ["bfloat17"] * len(KNOWN)}, ("dtypes", "'bfloat17'")),
        ({"dtypes": ["nn"] * len(KNOWN)}, ("dtypes", "'nn'")),
        ({"shapes": [[-1]] * len(KNOWN)}, ("shapes", "negative")),
    ],
)
def test_bad_tensor_layout_is_refused(
    untouched: Untouched, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    untouched.refuse_update(DISTRIBUTED, {**layout(1), **changes}, *words)


def test_group_without_a_place_for_the_rank_is_refused(untouched: Untouched) -> None:
    body = {**whole_body(JOIN), "rank_offset": 2, "world_size": 2}
    untouched.refuse(JOIN, body, "world_size", "rank_offset")
    untouched.refuse(JOIN, {**body, "rank_offset": 0}, "rank 0")


@pytest.mark.parametrize(
    "handles", [{}, {"GPU-another": "ipc:///tmp/x"}], ids=["none", "another device's"]
)
def test_missing_ipc_handle_for_the_device_is_refused(
    untouched: Untouched, handles: dict[str, str]
) -> None:
    untouched.refuse_update(IPC, {"zmq_handles": handles}, "zmq_handles")


# ---- order -------------------------------------------------------------------------------


def test_expected_version_inside_a_session_is_refused(untouched: Untouched) -> None:
    untouched.begin()
    body = {**V1, "serialized_named_tensors": [GOOD], "expected_version": "v0"}
    untouched.refuse(TENSOR, body, "expected_version", "begin_weight_update")


def test_draft_selector_without_a_draft_is_refused(untouched: Untouched) -> None:
    body = {**V1, "serialized_named_tensors": [GOOD], "selector": "draft"}
    untouched.refuse(TENSOR, body, "selector", "draft")


def test_whole_session_without_a_tensor_is_refused(untouched: Untouched) -> None:
    begun = {"non_blocking": True, "new_id": "mine", "partial": False}
    assert untouched.post(BEGIN, begun)[0] == 200
    untouched.refuse(END, {"session_id": "mine", "non_blocking": True}, "no tensor")


def test_pause_id_without_a_holder_is_refused(untouched: Untouched) -> None:
    for path in (PAUSE, CONTINUE):
        untouched.refuse(path, {"pause_id": "mine"}, "pause_id", "'mine'", status_codes=(409,))
