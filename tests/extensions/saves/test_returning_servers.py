"""A server that returns is brought to its fleet's version by a peer, without a trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from harness import marker
from harness.server import PLAIN, Server, serve
from harness.starting import end
from sglang_inflight.cli import app
from sglang_inflight.client import Fleet, VersionUnclear
from tests.extensions.saves.saved_folder import describe_tensors
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.pool import CHANGES
from tests.support.stalled_mount import stalled_mount
from tests.support.updates import (
    LIVE,
    Call,
    expect_served,
    refuse,
    serving,
    succeed,
    tensor_body,
)
from tests.support.workers import via_worker, workers

pytest_plugins = ["tests.support.fixtures"]
pytestmark = pytest.mark.usefixtures("as_before")

SAVE, DISCARD, EXPECT = "/inflight/save", "/inflight/discard", "/inflight/expect"
FROM_DISK, FROM_TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
TENSORS, PART = "rank-pp0-tp0.safetensors", "rank-pp0-tp0.json"
V0 = ("--weight-version", "v0")


def saved(server: Server, folder: Path, **fields: Any) -> Any:
    return succeed(server.post(SAVE, {"path": str(folder), **fields}))


def load(server: Server, folder: Path, **fields: Any) -> Any:
    body = {"model_path": str(folder), "load_format": "served", **LIVE, **fields}
    return server.post(FROM_DISK, body)


def digests(answer: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    return sorted((rank["pp_rank"], rank["tp_rank"], rank["digest"]) for rank in answer["ranks"])


def command(*words: str, urls: list[str]) -> Result:
    named = [word for url in urls for word in ("--url", url)]
    return CliRunner().invoke(app, ["fleet", *named, *words])


def table(urls: list[str]) -> dict[str, dict[str, Any]]:
    """Return the command's row of each server."""
    result = command("--json", urls=urls)
    assert result.exit_code == 0, result.output
    return {row["url"]: row for row in json.loads(result.stdout)["rows"]}


# ---- the whole way --------------------------------------------------------------------


def test_killed_server_comes_back_to_its_fleet_without_a_trainer(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    with (
        serve(checkpoints / "v0", *V0, log=tmp_path / "a.log") as one,
        serve(checkpoints / "v0", *V0, log=tmp_path / "b.log") as two,
    ):
        with serve(checkpoints / "v0", *V0, log=tmp_path / "c.log") as lost:
            urls = [one.url, two.url, lost.url]
            with Fleet(urls) as trainer:
                for version in ("v1", "v2"):
                    trainer.update_from_disk(str(checkpoints / version), weight_version=version)
            assert {row["behind"] for row in table(urls).values()} == {False}
            running = [
                each for server in (one, two) for each in start_running(server, 2, tokens=ENDLESS)
            ]
            end(lost.process)
            # the dead server fails, and the others are as they were
            result = command("--catch-up", "--folder", str(folder), "--json", urls=urls)
            assert result.exit_code == 5, result.output
            assert lost.url in result.stderr
            assert not folder.exists()
        with serve(checkpoints / "v0", *V0, log=tmp_path / "c2.log") as back:
            urls = [one.url, two.url, back.url]
            assert table(urls)[back.url]["behind"]
            assert status(back)["weight_version"] == "v0"
            expect_served(back, 0)
            result = command("--catch-up", "--folder", str(folder), urls=urls)
            assert result.exit_code == 0, result.output
            rows = table(urls)
            assert {(row["weight_version"], row["digest"]) for row in rows.values()} == {
                ("v2", status(one)["digest"])
            }
            assert all(row["ready"] and row["behind"] is False for row in rows.values())
            expect_served(back, 2)
            assert list(folder.iterdir()) == []
            # again: nothing is left to do
            epoch = status(back)["epoch"]
            again = command("--catch-up", "--folder", str(folder), urls=urls)
            assert again.exit_code == 0
            assert status(back)["epoch"] == epoch
            for output in expect_all_go_on(running):
                assert set(output.tokens) == {marker.token(2)}
                assert versions_of(output) == ["v2"]


def test_fleet_without_a_majority_asks_for_the_version(
    peer: Server, joiner: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """Both servers have committed, so neither one's version is the fleet's."""
    update(joiner, checkpoints, 3, **LIVE)
    urls = [peer.url, joiner.url]
    with Fleet(urls) as fleet:
        with pytest.raises(VersionUnclear, match="no version is served by more than half"):
            fleet.catch_up(str(tmp_path))
        assert command("--catch-up", urls=urls).exit_code == 3
        with pytest.raises(VersionUnclear, match="no server serves 'v7'"):
            fleet.catch_up(str(tmp_path), weight_version="v7")
        for server in (peer, joiner):
            assert server.get("/ready")["status_code"] == 200
        report = fleet.catch_up(str(tmp_path), weight_version="v1")
    assert not report.failures
    assert report.answers[joiner.url].peer == peer.url
    assert report.answers[peer.url].receipt is None
    expect_served(joiner, 1)


# ---- a server behind its fleet ----------------------------------------------------------


def test_watching_command_brings_a_server_each_time_it_falls_behind(
    peer: Server, joiner: Server, checkpoints: Path, tmp_path: Path
) -> None:
    named = ["--url", peer.url, "--url", joiner.url, "--weight-version", "v1"]
    words = [*named, "--catch-up", "--folder", str(tmp_path / "shared"), "--watch", "0.1"]
    command = Path(sys.executable).with_name("sglang-inflight")
    log = tmp_path / "watch.log"
    with log.open("wb") as sink:
        watching = subprocess.Popen([command, "fleet", *words], stdout=sink, stderr=sink)
    try:
        for _ in range(2):
            until("the joiner is brought", lambda: status(joiner)["weight_version"] == "v1")
            expect_served(joiner, 1)
            old = {"model_path": str(checkpoints / "v0"), "weight_version": "v0", **LIVE}
            succeed(joiner.post(FROM_DISK, {**old, "on_busy": "wait"}))
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0, log.read_text()
    finally:
        watching.kill()
        watching.wait()


def test_server_behind_its_fleet_takes_no_new_request(joiner: Server, checkpoints: Path) -> None:
    running = start_running(joiner, 2, tokens=ENDLESS)
    told = succeed(joiner.post(EXPECT, {"weight_version": "v1"}))
    assert "'v1'" in told["behind"]
    assert status(joiner)["behind"] == told["behind"]
    not_ready = joiner.get("/ready")
    assert (not_ready["status_code"], not_ready["message"]) == (503, told["behind"])
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    for path, asked in (
        ("/generate", body),
        ("/generate", body | {"stream": True}),
        ("/v1/completions", {"model": "default", "prompt": [5, 6], "max_tokens": 2}),
    ):
        answer = httpx.post(joiner.url + path, json=asked, **PLAIN)
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "1"
        assert "the fleet serves version 'v1'" in answer.json()["error"]["message"]
    assert joiner.get("/health")["status_code"] == 200
    more_tokens(running)
    update(joiner, checkpoints, 1, **LIVE)
    assert joiner.get("/ready")["status_code"] == 200
    assert status(joiner)["behind"] is None
    more_tokens(running)
    # the trainer's next version is no other one than expected
    update(joiner, checkpoints, 2, **LIVE)
    assert joiner.get("/ready")["status_code"] == 200
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2"]


def test_name_without_the_digest_is_behind(joiner: Server, checkpoints: Path) -> None:
    digest = update(joiner, checkpoints, 1, **LIVE)["ranks"][0]["digest"]
    wrong = f"{int(digest, 16) ^ 1:016x}"
    told = succeed(joiner.post(EXPECT, {"weight_version": "v1", "digest": wrong}))
    assert digest in told["behind"]
    assert joiner.get("/ready")["status_code"] == 503
    told = succeed(joiner.post(EXPECT, {"weight_version": "v1", "digest": digest}))
    assert told["behind"] is None
    assert joiner.get("/ready")["status_code"] == 200
    succeed(joiner.post(EXPECT, {"weight_version": "v5"}))
    succeed(joiner.post(EXPECT, {"weight_version": None}))
    assert joiner.get("/ready")["status_code"] == 200


def test_expectation_of_an_earlier_look_is_refused(joiner: Server, checkpoints: Path) -> None:
    """A trainer may have moved the fleet on since: all of its servers would be behind."""
    epoch = status(joiner)["epoch"]
    update(joiner, checkpoints, 2, **LIVE)
    body = {"weight_version": "v1", "epoch": epoch}
    refuse(joiner.post(EXPECT, body), "epoch", status_code=409)
    assert joiner.get("/ready")["status_code"] == 200
    refuse(joiner.post(EXPECT, {"digest": "0" * 16}), "digest needs the weight_version")


def test_all_workers_know_that_their_server_is_behind(
    workers_server: Server, checkpoints: Path
) -> None:
    until("there are two workers", lambda: len(workers(workers_server)) == 2)
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    for told_by, asked in ((0, 1), (1, 0)):
        found = workers(workers_server)
        with via_worker(workers_server, found[told_by]) as one:
            refuse(one.post(EXPECT, {"weight_version": "v1"}, headers={}), status_code=401)
            succeed(one.post(EXPECT, {"weight_version": "v1"}))
        with via_worker(workers_server, found[asked]) as other:
            assert other.get("/ready")["status_code"] == 503
            assert other.post("/generate", body)["error"]["type"] == "Behind"
        with via_worker(workers_server, found[told_by]) as one:
            succeed(one.post(EXPECT, {}))
        with via_worker(workers_server, found[asked]) as other:
            assert other.get("/ready")["status_code"] == 200
            assert "output_ids" in other.post("/generate", body)


# ---- saving -----------------------------------------------------------------------------


def test_commit_during_a_save_leaves_no_file(
    peer: Server, faults: Faults, checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    running = start_running(peer, 2, tokens=ENDLESS)
    faults.inject("write", "hang_deaf")
    save = Call(peer, SAVE, {"path": str(folder)})
    until("the save has begun", (folder / TENSORS).exists)
    for path in (folder, tmp_path / "other"):
        refuse(peer.post(SAVE, {"path": str(path)}), "already", status_code=409)
    assert not save.is_answered
    # the trainer's update neither waits for the save nor is refused
    update(peer, checkpoints, 2, **LIVE, timeout_s=60)
    assert not save.is_answered
    faults.clear()
    refuse(save.answer(), "moved on", status_code=409)
    assert not folder.exists()
    assert not (tmp_path / "other").exists()
    digest = saved(peer, folder)["ranks"][0]["digest"]
    assert digest == status(peer)["digest"]
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v1", "v2"]


def test_rename_during_a_save_is_noticed(peer: Server, faults: Faults, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    faults.inject("write", "hang_deaf")
    save = Call(peer, SAVE, {"path": str(folder)})
    until("the save has begun", (folder / TENSORS).exists)
    succeed(
        peer.post("/update_weight_version", {"new_version": "other", "abort_all_requests": False})
    )
    faults.clear()
    refuse(save.answer(), "'v1'", "'other'", status_code=409)
    assert not folder.exists()


def test_released_memory_is_not_read_by_a_save(
    peer: Server, faults: Faults, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    faults.inject("write", "hang_deaf")
    save = Call(peer, SAVE, {"path": str(folder)})
    until("the save has begun", (folder / TENSORS).exists)
    release = {"tags": ["weights"], "keep_weights": "host"}
    succeed(peer.post("/release_memory_occupation", release))
    faults.clear()
    refuse(save.answer(), "released", status_code=409)
    assert not folder.exists()
    refuse(peer.post(SAVE, {"path": str(folder)}), "released", status_code=409)
    succeed(peer.post("/resume_memory_occupation", {"tags": ["weights"]}))
    saved(peer, folder)


def test_save_whose_caller_leaves_leaves_no_file(
    peer: Server, faults: Faults, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    faults.inject("write", "hang_deaf")
    with pytest.raises(httpx.ReadTimeout):
        peer.post(SAVE, {"path": str(folder)}, timeout=httpx.Timeout(60, read=1))
    faults.clear()
    until("the folder is deleted", lambda: not folder.exists())
    saved(peer, folder)


def test_stalled_folder_takes_only_the_save_that_uses_it(
    peer: Server, checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    running = start_running(peer, 1, tokens=ENDLESS)
    with stalled_mount(folder):
        answer = peer.post(SAVE, {"path": str(folder / "saved"), "timeout_s": 1})
        refuse(answer, "time ran out")
        update(peer, checkpoints, 2, **LIVE, timeout_s=60)
        saved(peer, tmp_path / "saved")
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v1", "v2"]


def test_bad_saves_are_refused(peer: Server, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    refuse(peer.post(SAVE, {"path": "saved"}), "absolute")
    refuse(peer.post(SAVE, {}), "path")
    wrong = {"path": str(folder), "expected_version": "v7"}
    refuse(peer.post(SAVE, wrong), "'v7'", "'v1'", status_code=409)
    (tmp_path / "file").write_text("")
    refuse(peer.post(SAVE, {"path": str(tmp_path / "file")}), "file")
    assert not folder.exists()
    saved(peer, folder)
    before = (folder / TENSORS).read_bytes()
    refuse(peer.post(SAVE, {"path": str(folder)}), "is there already", status_code=409)
    assert (folder / TENSORS).read_bytes() == before
    (folder / "notes.txt").write_text("mine")
    succeed(peer.post(DISCARD, {"path": str(folder)}))
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    succeed(peer.post(DISCARD, {"path": str(folder)}))
    (folder / PART).write_text("{}")
    refuse(peer.post(DISCARD, {"path": str(folder)}), "saved")
    assert (folder / PART).exists()


# ---- loading ----------------------------------------------------------------------------


def altered(folder: Path) -> str:
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).write_bytes(content)
    return "has the digest"


def cut_short(folder: Path) -> str:
    whole = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(whole[:-2])
    return f"should have {len(whole)} bytes"


def without_manifest(folder: Path) -> str:
    (folder / "served.json").unlink()
    return "it has no served.json"


def of_other_weights(folder: Path) -> str:
    manifest = json.loads((folder / "served.json").read_text())
    manifest["ranks"]["pp0-tp0"]["digest"] = "0" * 16
    (folder / "served.json").write_text(json.dumps(manifest))
    return "0" * 16


def of_another_save(folder: Path) -> str:
    manifest = json.loads((folder / "served.json").read_text())
    (folder / "served.json").write_text(json.dumps(manifest | {"save_id": "other"}))
    return "another save"


def of_two_ranks(folder: Path) -> str:
    manifest = json.loads((folder / "served.json").read_text())
    manifest["ranks"] = {"pp0-tp1": manifest["ranks"]["pp0-tp0"]}
    (folder / "served.json").write_text(json.dumps(manifest))
    return "other ranks: pp0-tp1"


def of_another_layout(folder: Path) -> str:
    part = json.loads((folder / PART).read_text())
    part["layout"]["moe_runner_backend"] = "triton"
    (folder / PART).write_text(json.dumps(part))
    return "moe_runner_backend is 'triton' there"


def of_another_configuration(folder: Path) -> str:
    part = json.loads((folder / PART).read_text())
    part["layout"]["target rope_parameters.rope_theta"] = "1e6"
    (folder / PART).write_text(json.dumps(part))
    return "rope_theta is '1e6' there, and '10000.0' here"


def without_a_tensor(folder: Path) -> str:
    _rewrite(folder, lambda tensors: tensors.pop("target.lm_head.weight"))
    return "'target.lm_head.weight' is missing"


def with_another_tensor(folder: Path) -> str:
    _rewrite(folder, lambda t: t.update(stranger=t["target.lm_head.weight"].clone()))
    return "'stranger' is no weight"


def of_another_shape(folder: Path) -> str:
    def cut(tensors: dict[str, Any]) -> None:
        tensors["target.lm_head.weight"] = tensors["target.lm_head.weight"][:-1].clone()

    _rewrite(folder, cut)
    return "'target.lm_head.weight' is torch.bfloat16 of shape"


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    manifest = json.loads((folder / "served.json").read_text())
    manifest["ranks"]["pp0-tp0"]["bytes"] = (folder / TENSORS).stat().st_size
    (folder / "served.json").write_text(json.dumps(manifest))
    return tensors


def with_nan(folder: Path) -> str:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["target.lm_head.weight"][0, 0] = float("nan")

    tensors = _rewrite(folder, spoil)
    part = json.loads((folder / PART).read_text())
    # in the order of the rank's digest
    describe_tensors(folder, {name: tensors[name] for name in part["tensors"]})
    return "'target.lm_head.weight' holds NaN or infinity"


def of_an_unprintable_version(folder: Path) -> str:
    manifest = json.loads((folder / "served.json").read_text())
    (folder / "served.json").write_text(json.dumps(manifest | {"weight_version": "v2\0"}))
    return "some of them not printable"


DAMAGES = [
    altered,
    cut_short,
    without_manifest,
    of_other_weights,
    of_another_save,
    of_two_ranks,
    of_another_layout,
    of_another_configuration,
    without_a_tensor,
    with_another_tensor,
    of_another_shape,
    with_nan,
    of_an_unprintable_version,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_folder_changes_nothing(
    peer: Server, joiner: Server, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    saved(peer, tmp_path / "saved")
    words = damage(tmp_path / "saved")
    before = serving(joiner)
    refuse(load(joiner, tmp_path / "saved"), words)
    assert serving(joiner) == before
    expect_served(joiner, 0)


def test_fields_that_do_not_fit_served_weights_are_refused(
    peer: Server, joiner: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    saved(peer, folder)
    for fields, word in (
        ({"selector": "target"}, "selector"),
        ({"partial": True}, "partial"),
        ({"expected_digest": "0" * 16}, "expected_digest"),
    ):
        refuse(load(joiner, folder, **fields), word)
    session = succeed(joiner.post("/begin_weight_update", {"non_blocking": True}))["session_id"]
    succeed(joiner.post(FROM_TENSOR, tensor_body(marker.tensors(2), session_id=session)))
    refuse(load(joiner, folder, session_id=session), "update of their own")
    expect_served(joiner, 0)


MODES: dict[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "changes": (CHANGES, ()),
    "host": ({"SGLANG_INFLIGHT_STAGING": "host"}, ()),
    "off": ({"SGLANG_INFLIGHT_STAGING": "off"}, ()),
    "hollow": ({"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}, ("--load-format", "dummy")),
}


@pytest.mark.parametrize("mode", MODES)
def test_served_weights_come_in_each_form_of_staging(
    peer: Server, checkpoints: Path, tmp_path: Path, mode: str
) -> None:
    env, flags = MODES[mode]
    receipt = saved(peer, tmp_path / "saved")
    with serve(checkpoints / "v0", *V0, *flags, log=tmp_path / "log", env=dict(env)) as one:
        running = start_running(one, 1, tokens=ENDLESS) if mode != "hollow" else []
        damaged = tmp_path / "damaged"
        saved(peer, damaged)
        altered(damaged)
        refuse(load(one, damaged), "has the digest")
        if mode != "hollow":
            expect_served(one, 0)
        loaded = succeed(load(one, tmp_path / "saved"))
        assert loaded["weight_version"] == "v1"
        assert digests(loaded) == digests(receipt)
        assert status(one)["digest"] == status(peer)["digest"]
        assert one.get("/ready")["status_code"] == 200
        expect_served(one, 1)
        more_tokens(running)
        # what comes later starts from these weights
        head = {"lm_head.weight": marker.tensors(2)["lm_head.weight"]}
        body = tensor_body(head, weight_version="v2", **LIVE)
        succeed(one.post(FROM_TENSOR, body))
        assert update(peer, checkpoints, 2, **LIVE)["ranks"][0]["digest"] == status(one)["digest"]
        more_tokens(running)
        if mode in ("changes", "host"):
            for version in (1, 2):
                succeed(one.post("/inflight/rollback", {}))
                expect_served(one, version)
        for output in expect_all_go_on(running):
            assert versions_of(output)[:3] == ["v0", "v1", "v2"]


def test_served_weights_that_outgrow_their_memory_are_written_in_place(
    peer: Server, checkpoints: Path, tmp_path: Path
) -> None:
    saved(peer, tmp_path / "saved")
    saved(peer, tmp_path / "damaged")
    altered(tmp_path / "damaged")
    env = {**CHANGES, "SGLANG_INFLIGHT_CHANGES_BYTES": "16"}
    with serve(checkpoints / "v0", *V0, log=tmp_path / "log", env=env) as one:
        running = start_running(one, 1, tokens=ENDLESS)
        # damage is found before the first write
        refuse(load(one, tmp_path / "damaged"), "has the digest")
        expect_served(one, 0)
        receipt = succeed(load(one, tmp_path / "saved"))
        assert receipt["staged_as"]["form"] == "off"
        assert digests(receipt) == digests(status(peer))
        expect_served(one, 1)
        more_tokens(running)
        for output in expect_all_go_on(running):
            assert versions_of(output) == ["v0", "v1"]


def test_servers_of_another_layout_exchange_no_weights(
    peer: Server, checkpoints: Path, tmp_path: Path
) -> None:
    saved(peer, tmp_path / "saved")
    with serve(checkpoints / "v0", *V0, "--tp-size", "2", log=tmp_path / "log") as two:
        assert status(two)["layout"] != status(peer)["layout"]
        refuse(load(two, tmp_path / "saved"), ["layout", "other ranks"][1])
        with Fleet([peer.url, two.url]) as fleet:
            report = fleet.catch_up(str(tmp_path), weight_version="v1")
        assert "same layout" in str(report.failures[two.url])
        assert two.get("/ready")["status_code"] == 503
        assert peer.get("/ready")["status_code"] == 200


def test_hollow_server_saves_nothing(checkpoints: Path, tmp_path: Path) -> None:
    env = {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}
    with serve(checkpoints / "v0", *V0, log=tmp_path / "log", env=env) as one:
        answer = one.post(SAVE, {"path": str(tmp_path / "saved")})
        refuse(answer, "hollow", status_code=409)
        assert not (tmp_path / "saved").exists()
