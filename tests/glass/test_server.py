"""SGLang's server on the glass card: with overlap and without, graphs, and each form of staging.

The card reports a missing wait, an address that is nobody's, and memory that was given back, as an
error of the scheduler, which ends the server: each test's end asks whether it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, serve
from harness.trainer import Trainers
from sglang_inflight.client import Client, Receipt
from sglang_inflight.client import Sender as BroadcastSender
from tests.support import block_fp8, chain, lora, memory_release, mla
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    pause,
    resume,
    settle,
    start_running,
    update,
    versions_of,
)
from tests.support.memory_release import bytes_of, release, resume_memory
from tests.support.random_operations import act_at_random
from tests.support.updates import Sender, expect_served, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]

KEEP: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
SOURCES = ("disk", "tensor", "tensor_shared", "tensor_bucket", "distributed", "distributed_bucket")


@dataclass(frozen=True)
class Kind:
    """A server, and what its updates are staged as. ``model``: what a trainer sends."""

    name: str
    form: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Any = marker
    build: Callable[[Path, int], Path] = marker.build
    has_graphs: bool = True
    sources: tuple[str, ...] = SOURCES
    ranks: int = 1


NORMAL = "--disable-overlap-schedule"
BY_REFERENCE = ("disk", "tensor_shared", "tensor_bucket")  # torch pickles no FP8 by value
DEVICE = {"SGLANG_INFLIGHT_STAGING": "device"}
MLA: dict[str, Any] = {"model": mla, "build": mla.build}
# weights and KV larger than a segment of the device's memory
LARGE = memory_release.MODEL
# small models of which a start shows little
PLAIN = [
    Kind("overlap", "changes"),
    Kind("normal", "host", (NORMAL, "--disable-cuda-graph"), {"SGLANG_INFLIGHT_STAGING": "host"},
         has_graphs=False),
]  # fmt: skip
KINDS = [
    *PLAIN,
    Kind("second-copy", "device", env=DEVICE),
    Kind("tp2", "changes", ("--tp-size", "2"), {"GLASS_DEVICES": "2"}, ranks=2),
    Kind("mla", "changes", **MLA),
    Kind("mla-second-copy", "device", env=DEVICE, **MLA),
    Kind("fp8-blocks", "changes", env=block_fp8.ENV, model=block_fp8, build=block_fp8.build,
         sources=BY_REFERENCE),
    Kind("fp8-online", "changes", block_fp8.ONLINE, block_fp8.ENV, chain,
         block_fp8.build_unquantized, sources=SOURCES[:chain.VERSIONS - 1]),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


plain = pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name, indirect=True)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("versions")
    for version in range(len(SOURCES) + 1):
        kind.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def started(kind: Kind, folder: Path) -> Iterator[Server]:
    flags = ("--weight-version", "v0", *kind.flags)
    with serve(folder / "v0", *flags, log=folder / "log", env=dict(kind.env)) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    yield started
    assert started.is_alive()


@pytest.fixture
def sender(kind: Kind, folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder, folder, trainers, kind.model)


def test_updates_from_each_source_beside_running_requests(
    server: Server, kind: Kind, sender: Sender
) -> None:
    log = server.log_text()
    running = start_running(server, 3, tokens=ENDLESS)
    versions = ["v0"]
    for version, source in enumerate(kind.sources, start=1):
        name = f"v{version}"
        receipt = succeed(
            sender.send(server, source, version, ranks=kind.ranks, weight_version=name, **KEEP)
        )
        assert receipt["staged_as"]["form"] == kind.form
        expect_served(server, version)
        more_tokens(running)
        versions.append(name)
    succeed(server.post("/inflight/rollback", {"kv_cache": "keep"}))
    more_tokens(running)
    versions.append(versions[-2])
    for output in expect_all_go_on(running):
        assert versions_of(output) == versions
    said = server.log_text().removeprefix(log)
    assert ("cuda graph: True" in said) == kind.has_graphs


@plain
def test_random_updates_pauses_pins_and_aborts(server: Server, folder: Path) -> None:
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    act_at_random(server, folder, operations=120)


@plain
def test_blocking_update_waits_for_requests(server: Server, folder: Path, sender: Sender) -> None:
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    (running,) = start_running(server, 1, tokens=60)
    succeed(sender.send(server, "tensor", 1, weight_version="v1"))
    assert versions_of(expect_whole(running)) == ["v0"]
    expect_served(server, 1)


@plain
def test_session_of_two_calls_commits_once(server: Server, folder: Path) -> None:
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    running = start_running(server, 2, tokens=ENDLESS)
    succeed(server.post("/begin_weight_update", {}))
    items = list(marker.tensors(1).items())
    for part in (dict(items[:3]), dict(items[3:])):
        succeed(server.post("/update_weights_from_tensor", tensor_body(part)))
        more_tokens(running)
    named = {"weight_version": "v1", **KEEP}
    succeed(server.post("/end_weight_update", named))
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1"]


@plain
def test_saved_weights_are_served_again(server: Server, folder: Path, tmp_path: Path) -> None:
    update(server, folder, 1, non_blocking=True, kv_cache="recompute")
    (running,) = start_running(server, 1, tokens=ENDLESS)
    saved = succeed(server.post("/inflight/save", {"path": str(tmp_path / "saved")}))
    update(server, folder, 2, **KEEP)
    body = {"model_path": str(tmp_path / "saved"), "load_format": "served", **KEEP}
    receipt = succeed(server.post("/update_weights_from_disk", {**body, "weight_version": "v1"}))
    assert [rank["digest"] for rank in receipt["ranks"]] == [
        rank["digest"] for rank in saved["ranks"]
    ]
    more_tokens([running])
    expect_all_go_on([running])
    expect_served(server, 1)


@plain
def test_offered_weights_are_received_from_the_card(server: Server, folder: Path) -> None:
    """The server takes its own offer: both ends work at once, beside requests."""
    update(server, folder, 1, non_blocking=True, kv_cache="recompute")
    (running,) = start_running(server, 1, tokens=ENDLESS)
    with Client(server.url) as client:
        offered = client.offer_served_weights(expected_version="v1")
        receipt = client.update_from_peer(offered, kv_cache="keep")
        client.withdraw_served_weights(offered.offer_id)
        digest = client.status()["digest"]
    assert isinstance(receipt, Receipt)
    assert [rank.digest for rank in receipt.ranks] == [digest]
    assert [rank.digest for rank in offered.ranks] == [digest]
    more_tokens([running])
    expect_all_go_on([running])
    expect_served(server, 1)


@plain
def test_buffer_of_a_trainer_on_the_same_card_is_received(
    server: Server, folder: Path, sender: Sender
) -> None:
    """The trainer fills its buffer again and again, as checkpoint-engine does."""
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    (running,) = start_running(server, 1, tokens=ENDLESS)
    succeed(sender.send(server, "ipc", 1, weight_version="v1", **KEEP))
    more_tokens([running])
    (output,) = expect_all_go_on([running])
    assert versions_of(output) == ["v0", "v1"]


@plain
def test_broadcast_of_a_trainer_on_the_host_is_received(server: Server, folder: Path) -> None:
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    (running,) = start_running(server, 1, tokens=ENDLESS)
    with Client(server.url) as client, BroadcastSender(client, backend="gloo") as on_host:
        on_host.send(marker.tensors(1).items(), weight_version="v1", kv_cache="keep")
    more_tokens([running])
    (output,) = expect_all_go_on([running])
    assert versions_of(output) == ["v0", "v1"]
    expect_served(server, 1)


@plain
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_update_in_a_pause_is_seen_by_the_next_token(
    server: Server, folder: Path, mode: str
) -> None:
    update(server, folder, 0, non_blocking=True, kv_cache="recompute")
    running = start_running(server, 2, tokens=ENDLESS)
    pause(server, mode)
    settle(server, running)
    update(server, folder, 1, non_blocking=True, kv_cache="keep")
    resume(server)
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large")
    for version in range(2):
        LARGE.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def sleeper(large: Path) -> Iterator[Server]:
    flags = (
        "--enable-memory-saver", "--max-total-tokens", str(memory_release.TOKENS),
        "--weight-version", "v0", "--decode-log-interval", "1",
    )  # fmt: skip
    # otherwise the saver leaves out the graphs' memory
    env = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
    with serve(large / "v0", *flags, log=large / "log", env=env) as server:
        yield server
        assert server.is_alive()


@pytest.mark.parametrize("keep", ["host", "discard"])
def test_requests_and_graphs_survive_a_memory_release(
    sleeper: Server, large: Path, keep: str
) -> None:
    update(sleeper, large, 0, non_blocking=True, partial=False, kv_cache="recompute")
    frozen = start_running(sleeper, 2, tokens=200)
    pause(sleeper, "retract")
    settle(sleeper, frozen)
    released = release(sleeper, keep_weights=keep)
    assert bytes_of(released, "kv_cache") > 0.9 * memory_release.TOKENS * LARGE.token_bytes
    assert bytes_of(released, "weights") > 0.9 * LARGE.weights_bytes
    assert bytes_of(released, "cuda_graph") > 0
    resume_memory(sleeper, "weights")
    if keep == "discard":
        # hollow weights, written in place without a cache
        update(sleeper, large, 1, **KEEP)
    resume_memory(sleeper, "kv_cache", "cuda_graph")
    log = sleeper.log_text()
    resume(sleeper)
    expected = ["v0"] if keep == "host" else ["v0", "v1"]
    for generation in frozen:
        assert versions_of(expect_whole(generation)) == expected
    assert "cuda graph: True" in sleeper.log_text().removeprefix(log)
    expect_served(sleeper, len(expected) - 1)


def test_adapters_are_replaced_beside_running_requests(tmp_path: Path) -> None:
    folders = [lora.write(tmp_path / str(n), lora.tensors(n)) for n in range(2)]
    flags = (
        "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(lora.RANK),
        "--lora-target-modules", "o_proj", "--max-loras-per-batch", "4", "--disable-cuda-graph",
    )  # fmt: skip
    model = lora.build_model(tmp_path / "model")
    with serve(model, *flags, log=tmp_path / "log") as server:
        load: dict[str, Any] = {"lora_name": "policy", "lora_path": str(folders[0])}
        succeed(server.post("/load_lora_adapter", load))
        running = start_running(server, 2, tokens=ENDLESS, lora_path="policy")
        load |= {"lora_path": str(folders[1]), "replace": True, "running": "move"}
        succeed(server.post("/load_lora_adapter", load))
        more_tokens(running)
        plain = Generation(server, tokens=3, stream=False).output().tokens
        assert plain == [marker.token(0)] * 3
        for generation in running:
            generation.abort()
            tokens = generation.output().tokens
            assert (tokens[0], tokens[-1]) == (lora.token(0), lora.token(1))
        assert server.is_alive()
