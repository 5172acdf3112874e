"""The gateway smg in front of two servers, updated through it by its own client."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec
import pytest

from harness import marker
from harness.server import PLAIN, Server, free_port, serve
from harness.starting import ROOT, end
from tests.support.gateways import (
    BY_READINESS,
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    GENERATE,
    GENERATE_PATH,
    GREEDY,
    LONG,
    MODEL,
    NAMES,
    UNKEPT,
    WATCHFUL,
    Gateway,
    expect_openai_answers,
    expect_openai_stream_through,
    run_gateway,
    send,
)
from tests.support.load import (
    ENDLESS,
    expect_aborted,
    expect_whole,
    more_tokens,
    pause,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
    until_waiting,
    update,
    versions_of,
)
from tests.support.updates import (
    Call,
    by_value,
    drop_session,
    expect_served,
    expect_to_run_on,
    serving,
    succeed,
    until_idle,
    until_staging,
)
from tests.trainers.environment import python_of

ALL = "engine=sglang"
# this is longer than a test's pause
LEASE_S = 10
# bytes a second of staging, so that an update takes seconds
SLOW = 500_000
# the most that the gateway passes on of an answer
MOST_BYTES = 2**20
DISK, TENSOR = "update_weights_from_disk", "update_weights_from_tensor"
BEGIN, SEAL = "begin_weight_update", "seal_weight_update"
END, DROP = "end_weight_update", "abort_weight_update"
LIVE: dict[str, Any] = {"non_blocking": True, "kv_cache": "fence"}


@pytest.fixture(scope="module")
def smg() -> Any:
    """The gateway's own client: a module of smg's wheel that needs nothing else of it."""
    (path,) = python_of("smg").parents[1].glob("lib/python*/site-packages/smg/rl.py")
    spec = importlib.util.spec_from_file_location("smg_rl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look their module up
    sys.modules["smg_rl"] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def route(servers: Sequence[Server], *flags: str, log: Path) -> Iterator[Gateway]:
    """Run the gateway for the block. At its begin all ``servers`` get requests."""
    port = free_port()
    command: list[str | Path] = [
        python_of("smg"), "-m", "smg.launch_router", "--enable-rl",
        "--worker-urls", *(server.url for server in servers),
        "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        *BY_READINESS, *WATCHFUL, *flags,
    ]  # fmt: skip
    with run_gateway(command, port, servers, log) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def servers(
    smg: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("servers")
    env = {"SGLANG_INFLIGHT_PAUSE_LEASE_S": str(LEASE_S)}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                serve(checkpoints / "v0", *NAMES, log=logs / f"{index}.log", env=env)
            )
            for index in range(2)
        ]


@pytest.fixture(scope="module")
def gateway(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with route(servers, log=tmp_path_factory.mktemp("gateway") / "gateway.log") as gateway:
        yield gateway


@pytest.fixture
def rl(smg: Any, servers: list[Server], gateway: Gateway, checkpoints: Path) -> Iterator[Any]:
    """The client of a gateway in front of servers at version 0."""
    for server in servers:
        update(server, checkpoints, 0, **LIVE)
    yield smg.RL(gateway.url, timeout=120)
    for server in servers:
        drop_session(server)
        resume(server)


def id_of(rl: Any, server: Server) -> str:
    (found,) = (row.id for row in rl.workers() if row.base_url == server.url)
    return str(found)


def listed(rl: Any) -> set[str]:
    """Return the versions in the gateway's list."""
    return {row.weight_version for row in rl.workers()}


def served(rl: Any) -> set[str]:
    """Return the versions that the servers name through the gateway."""
    answers = rl.fanout("get_weight_version", selector=ALL, method="GET").results.values()
    return {answer.body["weight_version"] for answer in answers}


def disk(checkpoints: Path, version: int, **fields: Any) -> dict[str, Any]:
    name = f"v{version}"
    return {"model_path": str(checkpoints / name), "weight_version": name, **LIVE, **fields}


def begin(rl: Any) -> dict[str, Any]:
    """Open a whole session of one name on all servers, and return the name as a piece has it."""
    name = uuid.uuid4().hex
    body = {"new_id": name, "non_blocking": True, "partial": False, "on_busy": "refuse"}
    rl.fanout(BEGIN, {**body, "lease_s": 60}, selector=ALL)
    return {"session_id": name}


def piece(version: int, *, half: int | None = None) -> dict[str, Any]:
    """Return the body with the tensors of ``version``, or with one half of them."""
    weights = marker.tensors(version)
    names = sorted(weights) if half is None else sorted(weights)[half::2]
    return {"serialized_named_tensors": [by_value({name: weights[name] for name in names})]}


def end_of(named: dict[str, Any], version: int) -> dict[str, Any]:
    return {**named, **LIVE, "weight_version": f"v{version}"}


@contextlib.contextmanager
def leaving(gateway: Gateway, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a call to all servers, and close the connection after the block, before its answer."""
    connection = HTTPConnection(urlsplit(gateway.url).netloc, timeout=60)
    query = urlencode({"selector": ALL})
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/rl/engine/{path}?{query}", json.dumps(body), headers)
    yield
    connection.close()


def set_labels(gateway: Gateway, worker: str, labels: dict[str, str]) -> None:
    answer = httpx.patch(f"{gateway.url}/workers/{worker}", json={"labels": labels}, **PLAIN)
    assert answer.status_code == 202, answer.text


def register_again(gateway: Gateway, worker: str, server: Server) -> None:
    answer = httpx.put(f"{gateway.url}/workers/{worker}", json={"url": server.url}, **PLAIN)
    assert answer.status_code == 202, answer.text


# ---- what the gateway knows of a server --------------------------------------------------


def test_list_has_what_a_server_said_at_its_registration(rl: Any, servers: list[Server]) -> None:
    rows = rl.workers()
    assert {row.base_url for row in rows} == {server.url for server in servers}
    for row in rows:
        assert (row.engine, row.engine_version) == ("sglang", version("sglang"))
        assert (row.model_id, row.worker_type, row.health) == (MODEL, "regular", "ready")
        assert (row.tp_size, row.dp_size, row.pp_size) == (1, 1, 1)
        assert row.weight_version == "v0"
        # the gateway's table of SGLang
        assert row.capabilities["pause_modes"] == ["abort", "retract", "in_place"]
        assert row.capabilities["update_from"] == ["disk", "tensor", "distributed"]
        assert row.capabilities["reports_weight_version"] is True


def test_listed_version_is_true_after_a_label_or_a_new_registration(
    smg: Any, rl: Any, servers: list[Server], checkpoints: Path, tmp_path: Path
) -> None:
    with route(servers, log=tmp_path / "gateway.log") as gateway:
        rl = smg.RL(gateway.url)
        ids = [id_of(rl, server) for server in servers]
        streams = start_running(gateway, 2, tokens=ENDLESS)
        rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
        assert (listed(rl), served(rl)) == ({"v0"}, {"v1"})
        for worker in ids:
            set_labels(gateway, worker, {"weight_version": "v1"})
        until("the list has the label", lambda: listed(rl) == {"v1"})
        assert rl.fanout("ready", selector="weight_version=v1", method="GET").succeeded == 2
        rl.fanout("inflight/rollback", {"expected_version": "v1"}, selector=ALL)
        assert (listed(rl), served(rl)) == ({"v1"}, {"v0"})
        rl.fanout(DISK, disk(checkpoints, 2), selector=ALL)
        for worker, server in zip(ids, servers, strict=True):
            register_again(gateway, worker, server)
        until("the list has the served version", lambda: listed(rl) == {"v2"})
        assert [id_of(rl, server) for server in servers] == ids
        more_tokens(streams)
        for stream in streams:
            rl.fanout("abort_request", {"rid": stream.rid}, selector=ALL)
            assert versions_of(expect_aborted(stream)) == ["v0", "v1", "v0", "v2"]


def test_labels_name_more_abilities_until_a_new_registration(
    smg: Any, rl: Any, servers: list[Server], tmp_path: Path
) -> None:
    with route(servers, log=tmp_path / "gateway.log") as gateway:
        rl = smg.RL(gateway.url)
        worker = id_of(rl, servers[0])
        set_labels(
            gateway,
            worker,
            {
                "rl.pause_modes": "abort,retract,in_place,wait",
                "rl.update_from": "disk,tensor,distributed,ipc",
            },
        )
        until("labels count", lambda: rl.worker(worker).capabilities["source"] == "label")
        capabilities = rl.worker(worker).capabilities
        assert capabilities["pause_modes"][-1] == "wait"
        assert capabilities["update_from"][-1] == "ipc"
        register_again(gateway, worker, servers[0])
        until("labels are gone", lambda: rl.worker(worker).capabilities["source"] == "static")


# fields of one name in the gateway's rows and in a server's entry
SAID_BY_LABELS = ("pause_modes", "update_from")
SAID_BY_BOTH = (
    "engine", "engine_version", "model_id", "worker_type", "connection_mode", "tp_size",
    "dp_size", "pp_size", "health", "weight_version",
)  # fmt: skip


def test_labels_from_a_servers_entry_make_its_row_true(
    smg: Any, rl: Any, servers: list[Server], checkpoints: Path, tmp_path: Path
) -> None:
    """The line of docs/frameworks.md sets them."""
    with route(servers, log=tmp_path / "gateway.log") as gateway:
        rl = smg.RL(gateway.url)
        before = rl.worker(id_of(rl, servers[0]))
        rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
        for server in servers:
            set_labels_by_the_documents_line(gateway, id_of(rl, server), server)
        until("the list has the version", lambda: listed(rl) == {"v1"})
        for server in servers:
            row = rl.worker(id_of(rl, server))
            entry = rl.call(row.id, "inflight/worker", method="GET").body
            assert row.capabilities["source"] == "label"
            for name in SAID_BY_LABELS:
                assert row.capabilities[name] == entry["capabilities"][name]
            for name in SAID_BY_BOTH:
                assert getattr(row, name) == entry[name], name
            assert entry["weight_version"] == "v1"
        assert before.weight_version == "v0"
        ready = rl.fanout("ready", selector="weight_version=v1", method="GET")
        assert ready.succeeded == len(servers)


def set_labels_by_the_documents_line(gateway: Gateway, worker: str, server: Server) -> None:
    if shutil.which("jq") is None or shutil.which("curl") is None:
        pytest.skip("needs curl and jq")
    text = (ROOT / "docs" / "frameworks.md").read_text()
    (line,) = re.findall(r"^curl .*/inflight/worker .*$", text, re.MULTILINE)
    line = line.replace("http://one:30000", server.url)
    line = line.replace("http://gateway:30000", gateway.url)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        env={**os.environ, "id": worker, "no_proxy": "*"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "error" not in done.stdout, done.stdout


# ---- calls of one server -----------------------------------------------------------------


def test_receipts_and_refusals_of_one_server_come_whole(
    rl: Any, gateway: Gateway, servers: list[Server], checkpoints: Path
) -> None:
    worker = id_of(rl, servers[0])
    done = rl.call(worker, DISK, disk(checkpoints, 1))
    (vote,) = done.body["ranks"]
    assert (done.status, vote["success"], done.body["base_version"]) == (200, True, "v0")
    now = rl.call(worker, "inflight/status", method="GET").body
    assert now == status(servers[0])
    assert (now["weight_version"], now["digest"]) == ("v1", vote["digest"])
    refused = rl.call(worker, DISK, disk(checkpoints, 2, expected_version="v0"))
    assert (refused.status, refused.body["error"]["type"]) == (409, "Conflict")
    query = {"weight_version": "v1", "timeout_s": 0}
    assert rl.call(worker, "inflight/wait", method="GET", params=query).status == 200
    path = f"/v1/rl/workers/{worker}/engine/inflight/wait?weight_version=v9&timeout_s=0"
    unserved = httpx.get(gateway.url + path, **PLAIN)
    assert (unserved.status_code, unserved.json()["body"]["error"]["type"]) == (503, "NotServed")
    # headers do not pass
    assert "retry-after" not in unserved.headers
    expect_served(servers[1], 0)


def test_answer_beyond_a_mebibyte_comes_cut_as_text(
    rl: Any, gateway: Gateway, servers: list[Server]
) -> None:
    """The status stays 200, and the gateway's client leaves the field out that says so."""
    body = {
        "input_ids": [7] * 1500,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 64,
        "sampling_params": {"max_new_tokens": 1},
    }
    worker = id_of(rl, servers[0])
    answer = send(gateway, f"/v1/rl/workers/{worker}/engine/generate", body).json()
    assert (answer["status"], answer["body_truncated"]) == (200, True)
    assert len(answer["body"]) == MOST_BYTES
    assert isinstance(rl.call(worker, "generate", body).body, str)


def test_receipts_of_thousands_of_ranks_fit_into_an_answer(
    rl: Any, servers: list[Server], checkpoints: Path
) -> None:
    receipt = rl.call(id_of(rl, servers[0]), DISK, disk(checkpoints, 1)).body
    state = rl.call(id_of(rl, servers[0]), "inflight/status", method="GET").body
    assert ranks_that_fit(receipt) > 8000
    assert ranks_that_fit(state) > 1000


def ranks_that_fit(answer: dict[str, Any]) -> int:
    """Return how many ranks like the answer's only one the gateway passes on."""
    (rank,) = answer["ranks"]
    whole, of_rank = (len(msgspec.json.encode(each)) for each in (answer, rank))
    return (MOST_BYTES - whole) // of_rank + 1


# ---- updates of all servers --------------------------------------------------------------


def test_streams_go_on_through_an_update_of_all(
    rl: Any, gateway: Gateway, servers: list[Server], checkpoints: Path
) -> None:
    streams = start_running(gateway, 6, tokens=LONG)
    whole = start(gateway, 6, tokens=LONG, stream=False)
    until("both servers run rollouts", lambda: all(status(s)["running"] > 3 for s in servers))
    answers = rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
    assert (answers.total, answers.succeeded) == (2, 2)
    receipts = [answer.body for answer in answers.results.values()]
    assert {receipt["weight_version"] for receipt in receipts} == {"v1"}
    assert len({rank["digest"] for receipt in receipts for rank in receipt["ranks"]}) == 1
    for generation in streams + whole:
        assert versions_of(expect_whole(generation)) == ["v0", "v1"]


def test_plain_update_of_all_can_change_one_server_alone(
    smg: Any, rl: Any, servers: list[Server], checkpoints: Path
) -> None:
    rl.call(id_of(rl, servers[0]), DISK, disk(checkpoints, 1))
    with pytest.raises(smg.FanoutError) as split:
        rl.fanout(DISK, disk(checkpoints, 2, expected_version="v1"), selector=ALL)
    assert split.value.status == 207
    (failed,) = split.value.result.failed
    assert (failed.url, failed.status) == (servers[1].url, 409)
    expect_served(servers[0], 2)
    expect_served(servers[1], 0)


def test_session_changes_all_servers_in_two_phases(
    rl: Any, gateway: Gateway, checkpoints: Path
) -> None:
    streams = start_running(gateway, 4, tokens=LONG)
    named = begin(rl)
    for half in 0, 1:
        rl.fanout(TENSOR, {**named, **piece(1, half=half)}, selector=ALL)
    rl.fanout(SEAL, named, selector=ALL)
    assert served(rl) == {"v0"}
    receipts = rl.fanout(END, end_of(named, 1), selector=ALL).results.values()
    assert all(receipt.body["ranks"][0]["success"] for receipt in receipts)
    assert served(rl) == {"v1"}
    again = rl.fanout(END, end_of(named, 1), selector=ALL, allow_partial=True)
    assert [failed.status for failed in again.failed] == [409, 409]
    for stream in streams:
        assert versions_of(expect_whole(stream)) == ["v0", "v1"]


def fill_session(rl: Any, servers: list[Server], refused: str) -> None:
    """Go through a session that the second server refuses at its begin, a piece, or the seal."""
    named = begin(rl)
    one, other = (id_of(rl, server) for server in servers)
    if refused == TENSOR:
        rl.call(other, DROP, named)
    if refused == SEAL:
        rl.call(one, TENSOR, {**named, **piece(1)})
        rl.call(other, TENSOR, {**named, **piece(1, half=0)})
    else:
        rl.fanout(TENSOR, {**named, **piece(1)}, selector=ALL)
    rl.fanout(SEAL, named, selector=ALL)


@pytest.mark.parametrize("refused", [BEGIN, TENSOR, SEAL])
def test_dropped_session_has_changed_no_server(
    smg: Any, rl: Any, servers: list[Server], refused: str
) -> None:
    """One server refuses a call, and the client then drops the session on all."""
    before = [serving(server) for server in servers]
    if refused == BEGIN:
        rl.call(id_of(rl, servers[1]), BEGIN, {"non_blocking": True, "new_id": "another"})
    with pytest.raises(smg.FanoutError) as split:
        fill_session(rl, servers, refused)
    (failed,) = split.value.result.failed
    assert failed.url == servers[1].url
    assert split.value.result.succeeded == 1
    rl.fanout(DROP, {}, selector=ALL, allow_partial=True)
    for server in servers:
        until_idle(server)
    assert [serving(server) for server in servers] == before


def test_end_without_all_seals_changes_one_server_alone(
    smg: Any, rl: Any, servers: list[Server]
) -> None:
    named = begin(rl)
    one, other = (id_of(rl, server) for server in servers)
    rl.call(one, TENSOR, {**named, **piece(1)})
    rl.call(other, TENSOR, {**named, **piece(1, half=0)})
    rl.fanout(SEAL, named, selector=ALL, allow_partial=True)
    with pytest.raises(smg.FanoutError):
        rl.fanout(END, end_of(named, 1), selector=ALL)
    expect_served(servers[0], 1)
    expect_served(servers[1], 0)


# ---- pauses ------------------------------------------------------------------------------


def test_streams_freeze_in_a_pause_of_all_and_go_on(
    smg: Any, rl: Any, gateway: Gateway, servers: list[Server], checkpoints: Path
) -> None:
    streams = start_running(gateway, 4, tokens=LONG)
    with smg.paused(rl, ALL, mode="in_place") as granted:
        assert all(answer.body["paused"] for answer in granted.results.values())
        for server in servers:
            settle(server, streams)
        rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
    for stream in streams:
        assert versions_of(expect_whole(stream)) == ["v0", "v1"]


def test_gateway_refuses_requests_once_it_knows_that_all_servers_pause(
    smg: Any, rl: Any, gateway: Gateway
) -> None:
    with smg.paused(rl, ALL, mode="in_place"):
        until("no server gets requests", lambda: not gateway.healthy())
        refused = send(gateway, GENERATE_PATH, GENERATE)
        assert refused.status_code == 503
        assert refused.headers["x-smg-error-code"] == "no_available_workers"
    until("both get requests", lambda: len(gateway.healthy()) == 2)
    expect_served(gateway, 0)


def test_requests_wait_at_paused_servers_behind_a_gateway_that_asks_for_health(
    smg: Any, rl: Any, servers: list[Server], tmp_path: Path
) -> None:
    by_health = "--health-check-endpoint", "/health"
    with route(servers, *by_health, log=tmp_path / "gateway.log") as gateway:
        with smg.paused(smg.RL(gateway.url), ALL, mode="in_place"):
            waiting = start(gateway, 4, tokens=5)
            for server in servers:
                until_waiting(server, 2)
            assert len(gateway.healthy()) == 2
        for generation in waiting:
            expect_whole(generation)


def test_pause_of_a_killed_trainer_ends_with_its_lease(
    rl: Any, gateway: Gateway, servers: list[Server]
) -> None:
    streams = start_running(gateway, 4, tokens=LONG)
    command = [str(python_of("smg")), "-m", "tests.trainers.smg.hold_pause", gateway.url, ALL]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, process_group=0)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"paused\n"
        assert all(status(server)["paused"] for server in servers)
    finally:
        end(trainer)
    for stream in streams:
        expect_whole(stream)
    assert not any(status(server)["paused"] for server in servers)


@pytest.mark.parametrize("path", ["pause_generation", DISK, END])
def test_call_whose_caller_has_left_changes_nothing(
    rl: Any, gateway: Gateway, servers: list[Server], checkpoints: Path, path: str
) -> None:
    """The calls wait for running requests, and hold new ones back meanwhile."""
    before = [serving(server) for server in servers]
    for server in servers:
        start_running(server, 1, tokens=ENDLESS)
    if path == END:
        body = begin(rl)
        rl.fanout(TENSOR, {**body, **piece(1)}, selector=ALL)
    else:
        body = {"mode": "wait"} if path != DISK else {**disk(checkpoints, 1), "non_blocking": False}
    with leaving(gateway, path, body):
        until("both hold requests back", lambda: all(status(s)["holders"] for s in servers))
    until("none holds requests back", lambda: not any(status(s)["holders"] for s in servers))
    for server in servers:
        until_idle(server)
        expect_served(server, 0)
        server.post("/abort_request", {"abort_all": True})
    assert [serving(server) for server in servers] == before


def test_pause_that_one_server_had_granted_before_its_caller_left_ends_with_its_lease(
    rl: Any, gateway: Gateway, servers: list[Server]
) -> None:
    """The other server still waits for a request, and releases its pause at once."""
    granted = '"POST /pause_generation HTTP/1.1" 200'
    before = servers[0].log_text().count(granted)
    start_running(servers[1], 1, tokens=ENDLESS)
    with leaving(gateway, "pause_generation", {"mode": "wait"}):
        until("one has granted it", lambda: servers[0].log_text().count(granted) > before)
        until("the other one waits", lambda: status(servers[1])["holders"])
    until("the other one goes on", lambda: not status(servers[1])["holders"])
    assert status(servers[0])["paused"]
    until("its lease has ended", lambda: not status(servers[0])["paused"])
    servers[1].post("/abort_request", {"abort_all": True})


# ---- requests ----------------------------------------------------------------------------


def test_openai_answers_name_their_versions_through_updates(
    rl: Any, gateway: Gateway, checkpoints: Path
) -> None:
    for number in 0, 1, 2:
        rl.fanout(DISK, disk(checkpoints, number), selector=ALL)
        for _ in range(2):
            expect_openai_answers(gateway, number)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_openai_streams_go_on_through_an_update(
    rl: Any, gateway: Gateway, checkpoints: Path, path: str
) -> None:
    expect_openai_stream_through(
        gateway, path, lambda: rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
    )


@pytest.mark.parametrize("fields", [UNKEPT, {"custom_params": UNKEPT}, {"weight_version": "v9"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [(GENERATE_PATH, GENERATE), (CHAT_PATH, CHAT), (COMPLETIONS_PATH, COMPLETION)],
)
def test_contract_is_refused_as_by_the_server_itself(
    rl: Any,
    gateway: Gateway,
    servers: list[Server],
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    if path == GENERATE_PATH and "custom_params" in fields:
        fields = {"sampling_params": {**GREEDY, **fields}}
    by_server = send(servers[0], path, {**body, **fields})
    by_gateway = send(gateway, path, {**body, **fields})
    assert by_server.status_code in (409, 503)
    assert by_gateway.status_code == by_server.status_code
    assert "'v9'" in by_gateway.text
    for name in "x-inflight-weight-version", "retry-after":
        assert by_gateway.headers.get(name) == by_server.headers.get(name)


def test_contract_finds_the_server_that_can_keep_it(
    rl: Any, gateway: Gateway, servers: list[Server], checkpoints: Path
) -> None:
    """The gateway sends a request again that one server has refused with 503."""
    rl.call(id_of(rl, servers[0]), DISK, disk(checkpoints, 1))
    for name in ("v0", "v1") * 3:
        fields = {"exact_weight_version": name, "version_timeout_s": 0}
        answer = send(gateway, COMPLETIONS_PATH, {**COMPLETION, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-inflight-weight-version-start"] == name


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/inflight/status"),
        ("GET", "/ready"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/pause_generation"),
        ("POST", "/abort_request"),
    ],
)
def test_control_calls_need_the_gateways_own_path(
    rl: Any, gateway: Gateway, method: str, path: str
) -> None:
    assert httpx.request(method, gateway.url + path, timeout=60, **PLAIN).status_code == 404
    reached = httpx.request(
        method, f"{gateway.url}/v1/rl/engine{path}", json={}, timeout=60, **PLAIN
    )
    assert reached.json()["error"] == "selector_required"


# ---- servers that cannot serve -----------------------------------------------------------


def test_paused_server_gets_no_requests(rl: Any, gateway: Gateway, servers: list[Server]) -> None:
    pause(servers[0], "in_place", lease_s=600)
    until("the paused server is left out", lambda: gateway.healthy() == {servers[1].url})
    for _ in range(6):
        assert send(gateway, GENERATE_PATH, GENERATE).status_code == 200
    assert status(servers[0])["waiting"] == 0
    assert rl.fanout("is_paused", selector=f"{ALL},health=ready", method="GET").total == 1
    resume(servers[0])
    until("it is back", lambda: len(gateway.healthy()) == 2)


def test_killed_server_fails_calls_of_all_and_gets_no_requests(
    smg: Any, rl: Any, servers: list[Server], checkpoints: Path, tmp_path: Path
) -> None:
    """Whole answers are made anew by the other server, and begun streams break."""
    with serve(checkpoints / "v0", *NAMES, log=tmp_path / "third.log") as third:
        both = [servers[1], third]
        with route(both, log=tmp_path / "gateway.log") as gateway:
            rl = smg.RL(gateway.url)
            streams = start_running(gateway, 2, tokens=LONG)
            rollouts = start(gateway, 6, tokens=LONG, stream=False)
            until("both servers run rollouts", lambda: all(status(s)["running"] for s in both))
            end(third.process)
            for generation in rollouts:
                assert versions_of(expect_whole(generation)) == ["v0"]
            for stream in streams:
                stream.wait_for_end()
            assert sorted(stream.output_so_far().endings for stream in streams) == [0, 1]
            with pytest.raises(smg.FanoutError) as split, smg.paused(rl, ALL, mode="in_place"):
                raise AssertionError("the block has run")
            (failed,) = split.value.result.failed
            assert (failed.url, failed.error) == (third.url, "upstream_unreachable")
            assert not status(servers[1])["paused"]
            until("the dead server is left out", lambda: gateway.healthy() == {servers[1].url})
            ready = f"{ALL},health=ready"
            assert rl.fanout(DISK, disk(checkpoints, 1), selector=ready).total == 1
            expect_served(gateway, 1)


# ---- transparent windows -----------------------------------------------------------------


@pytest.fixture
def transparent(
    smg: Any, checkpoints: Path, tmp_path: Path
) -> Iterator[tuple[Any, Gateway, Server]]:
    """A server in transparent mode. It stages slowly beside requests."""
    env = {
        "SGLANG_INFLIGHT_TRANSPARENT": "1",
        "SGLANG_INFLIGHT_PACE_BYTES_PER_S": str(SLOW),
    }
    with (
        serve(checkpoints / "v0", *NAMES, log=tmp_path / "server.log", env=env) as server,
        route([server], log=tmp_path / "gateway.log") as gateway,
    ):
        yield smg.RL(gateway.url, timeout=120), gateway, server


def test_requests_go_on_in_a_pause_that_is_a_window(
    smg: Any, transparent: tuple[Any, Gateway, Server], checkpoints: Path
) -> None:
    rl, gateway, server = transparent
    streams = start_running(gateway, 4, tokens=ENDLESS)
    with smg.paused(rl, ALL, mode="in_place") as granted:
        (window,) = (answer.body for answer in granted.results.values())
        assert (window["transparent"], window["paused"]) == (True, False)
        more_tokens(streams)
        rl.fanout(DISK, disk(checkpoints, 1), selector=ALL)
        assert gateway.healthy() == {server.url}
        expect_served(gateway, 0)
    assert (served(rl), listed(rl)) == ({"v1"}, {"v0"})
    expect_to_run_on(server, streams, [0, 1])


def test_window_whose_caller_has_left_keeps_its_outcome(
    transparent: tuple[Any, Gateway, Server], checkpoints: Path
) -> None:
    rl, gateway, server = transparent
    streams = start_running(gateway, 1, tokens=ENDLESS)
    rl.fanout("pause_generation", {"mode": "in_place"}, selector=ALL)
    sent = Call(server, f"/{DISK}", disk(checkpoints, 1))
    until_staging(server)
    with leaving(gateway, "continue_generation", {}):
        until("the window ends", lambda: not server.get("/is_paused")["is_paused"])
        assert not sent.is_answered, "the commit has come before the caller left"
    until("the server has noticed", lambda: "its caller has left" in server.log_text())
    (again,) = rl.fanout("continue_generation", {}, selector=ALL).results.values()
    assert again.body["receipt"]["weight_version"] == "v1"
    succeed(sent.answer())
    assert served(rl) == {"v1"}
    expect_to_run_on(server, streams, [0, 1])
