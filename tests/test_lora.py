"""Adapters that come, change and go under requests that use them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from harness import marker
from harness.server import Server, schedulers
from tests.support import lora, trl
from tests.support.away import release, take_back
from tests.support.engine import play
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    ask,
    expect_all_go_on,
    labels_of,
    more_tokens,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
)
from tests.support.lora import RANK
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.workers import door, workers

_serial = itertools.count()

LORA = (
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK),
    "--lora-target-modules", "o_proj", "--weight-version", "v0",
)  # fmt: skip
MAX_LOADED = 3
LIMITED = ("--max-loras-per-batch", str(MAX_LOADED), "--max-loaded-loras", str(MAX_LOADED))
FLAVOURS |= {
    "lora_overlap": Flavour(
        (*LORA, "--max-loras-per-batch", "4", "--enable-memory-saver"),
        {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"},
        model=lora.build_model,
    ),
    "lora_normal": Flavour((*LORA, *LIMITED, "--disable-overlap-schedule"), model=lora.build_model),
    "lora_workers": Flavour(
        (*LORA, *LIMITED, "--tokenizer-worker-num", "2"),
        {
            "SGLANG_INFLIGHT_VLLM_ROUTES": "1",
            # how long uvicorn may take to see that a worker has died
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "3",
        },
        model=lora.build_model,
    ),
    "lora_tp2": Flavour(
        (*LORA, "--max-loras-per-batch", "4", "--tp-size", "2"), model=lora.build_model
    ),
}


def on(*kinds: str) -> pytest.MarkDecorator:
    flavours = [f"lora_{kind}" for kind in kinds]
    return pytest.mark.parametrize("lora_server", flavours, indirect=True)


@pytest.fixture
def lora_server(request: pytest.FixtureRequest, pool: ServerPool) -> Server:
    return pool.get(FLAVOURS[request.param])


@pytest.fixture
def server(lora_server: Server) -> Iterator[Server]:
    """It has no request and no adapter after the test."""
    yield lora_server
    resume(lora_server)
    ask(lora_server, "POST", "/abort_request", {"abort_all": True})
    for name in loaded(lora_server):
        assert unload(lora_server, name)["success"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters by their numbers."""
    root = tmp_path_factory.mktemp("adapters")
    return [lora.write(root / str(number), lora.tensors(number)) for number in range(3)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It adds nothing: what matters is who uses it."""
    return lora.write(tmp_path_factory.mktemp("adapter"), lora.uniform(0.0))


@pytest.fixture(scope="module")
def other_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It turns the hidden state round, so that its token has the least logit of all."""
    return lora.write(tmp_path_factory.mktemp("other"), lora.uniform(-10.0))


@pytest.fixture
def name(server: Server, adapter: Path) -> str:
    """An adapter of the test's own."""
    return load(server, adapter)


def load(server: Server, adapter: Path) -> str:
    name = new_name()
    ask(server, "POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
    return name


def new_name() -> str:
    return f"adapter-{next(_serial)}"


def unload(server: Server, name: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/unload_lora_adapter", {"lora_name": name, **fields})
    return answer


def loaded(server: Server) -> set[str]:
    """Names that requests find."""
    return {m["id"] for m in ask(server, "GET", "/v1/models")["data"] if m.get("parent")}


def unloadings(server: Server) -> int:
    return server.log_text().count("LoRA adapter unloading completes")


@on("overlap", "workers")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_adapter_of_paused_requests_stays(
    server: Server, adapter: Path, name: str, mode: str
) -> None:
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    pause(server, mode)
    answer = unload(server, name)
    assert answer["status_code"] == 409, answer
    assert f"'{name}'" in answer["message"]
    assert "2 paused requests" in answer["message"]
    # it keeps nobody else waiting, and nothing has become of the adapter
    assert unload(server, load(server, adapter))["success"]
    running += start(server, 1, tokens=ENDLESS, lora_path=name)
    resume(server)
    expect_all_go_on(running)
    assert unload(server, name)["success"]


@on("overlap", "workers")
def test_an_unloading_that_a_pause_overtakes(server: Server, adapter: Path, name: str) -> None:
    """It waits for requests, as SGLang has it, and a pause ends the waiting."""
    running = start_running(server, 1, tokens=ENDLESS, lora_path=name)
    with ThreadPoolExecutor() as threads:
        unloading = threads.submit(unload, server, name)
        begun = f"Start unload Lora adapter. Lora name={name}"
        until("it is begun", lambda: begun in server.log_text())
        running[0].wait_for_tokens(running[0].count + 3)
        assert not unloading.done()
        pause(server, "in_place")
        answer = unloading.result()
    assert answer["status_code"] == 400, answer
    assert "1 paused request " in answer["error_message"]
    assert unload(server, load(server, adapter))["success"]
    resume(server)
    expect_all_go_on(running)
    assert unload(server, name)["success"]


@on("overlap", "normal", "workers")
def test_a_name_is_taken_from_paused_requests(server: Server, name: str) -> None:
    """Nobody waits for them, and the adapter goes with the last."""
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    before = unloadings(server)
    pause(server, "in_place")
    assert unload(server, name, non_blocking=True)["success"]
    assert name not in loaded(server)
    late = server.post("/generate", {"input_ids": prompt(), "lora_path": name})
    assert late["status_code"] == 400, late
    assert unload(server, name, non_blocking=True)["status_code"] == 404
    assert unloadings(server) == before
    resume(server)
    expect_all_go_on(running)
    until("it is unloaded", lambda: unloadings(server) == before + 1)


@on("overlap")
def test_an_adapter_that_nobody_uses_is_unloaded_in_a_pause(server: Server, name: str) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    assert unload(server, name)["success"]
    resume(server)
    expect_all_go_on(running)


@on("overlap")
@pytest.mark.parametrize("keep", ["host", "discard"])
def test_while_memory_is_away(
    server: Server, folders: list[Path], name: str, tmp_path: Path, keep: str
) -> None:
    """Adapters come, change and go, and a profile begins and ends: none of it needs weights."""
    policy, other = Policy(server, None), Policy(server, folders)
    policy.load(0)
    running = policy.start(2)
    pause(server, "retract")
    release(server, keep_weights=keep)
    assert unload(server, name)["success"]
    other.load(2)
    assert policy.load(1, replace=True, running="move")["moved"] == 2
    profile = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    for path, body in (("/start_profile", profile), ("/stop_profile", None)):
        answer = server.post(path, body)
        assert answer["status_code"] == 200, answer
    assert list(tmp_path.iterdir())
    take_back(server)
    if keep == "discard":
        model = lora.build_model(tmp_path / "model")
        whole = {"model_path": str(model), "weight_version": "v0", "partial": False}
        ask(server, "POST", "/update_weights_from_disk", whole)
    resume(server)
    later = other.start(1)
    other.expect_all(later, 2)
    policy.expect_all(running, 0, 1)


# ---- a name passes to another adapter ----------------------------------------------------


class Policy:
    """A name, and the adapters that had it: their numbers, by version."""

    def __init__(self, server: Server, folders: list[Path] | None, *, ranks: int = 1) -> None:
        """From ``folders``, or from tensors."""
        self.name = new_name()
        self.versions: dict[int, str] = {}
        self._server = server
        self._folders = folders
        self._ranks = ranks

    def load(self, number: int, **fields: Any) -> dict[str, Any]:
        answer = self.try_to_load(number, adapter_version=f"step {number}", **fields)
        assert answer["status_code"] == 200, answer
        assert (answer["lora_name"], answer["success"]) == (self.name, True)
        self.versions[number] = answer["adapter_version"]
        return answer

    def try_to_load(self, number: int, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"lora_name": self.name, **fields}
        path = "/load_lora_adapter"
        if self._folders is not None:
            body["lora_path"] = str(self._folders[number])
        else:
            path += "_from_tensors"
            body |= lora.tensor_body(lora.tensors(number), ranks=self._ranks)
        answer: dict[str, Any] = self._server.post(path, body)
        return answer

    def start(self, n: int, /, **request: Any) -> list[Generation]:
        request = {"tokens": ENDLESS, **request}
        return start_running(self._server, n, lora_path=self.name, **request)

    def expect(self, output: Output, *numbers: int) -> None:
        """Its tokens are of these adapters, one after the other, and its spans say so."""
        told = lora.spans_by_tokens(output.tokens, self.name, self.versions)
        assert output.meta["adapter_versions"] == told
        assert [span["version"] for span in told] == [self.versions[n] for n in numbers]
        assert labels_of(output.meta["weight_versions"]) == ["v0"] * len(output.tokens)

    def expect_all(self, generations: list[Generation], *numbers: int) -> list[Output]:
        """They go on, and are aborted then."""
        more_tokens(generations)
        outputs = []
        for generation in generations:
            generation.abort()
            outputs.append(generation.output())
            self.expect(outputs[-1], *numbers)
        return outputs


@on("overlap", "normal", "workers")
@pytest.mark.parametrize(
    ("source", "mode"), [("folders", None), ("folders", "retract"), ("tensors", "in_place")]
)
def test_running_requests_finish(
    server: Server, folders: list[Path], source: str, mode: str | None
) -> None:
    policy = Policy(server, folders if source == "folders" else None)
    policy.load(0)
    running = policy.start(2)
    before = unloadings(server)
    if mode is not None:
        pause(server, mode)
    answer = policy.load(1, replace=True)
    assert loaded(server) == set(answer["loaded_adapters"]) == {policy.name}
    later = start(server, 1, tokens=ENDLESS, lora_path=policy.name)
    resume(server)
    assert unloadings(server) == before
    policy.expect_all(running, 0)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    policy.expect_all(later, 1)


@on("overlap", "normal", "workers")
@pytest.mark.parametrize("kv_cache", ["recompute", "fence"])
@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
def test_running_requests_move(server: Server, kv_cache: str, mode: str | None) -> None:
    """While they run, the old adapter goes, and the new one is theirs."""
    policy = Policy(server, None)
    policy.load(0)
    shared = prompt()
    running = policy.start(1) + policy.start(1, input_ids=shared)
    (twice,) = policy.start(1, n=2)
    plain = start_running(server, 1, tokens=ENDLESS)
    before = unloadings(server)
    if mode is not None:
        pause(server, mode)
        settle(server, running)
    answer = policy.load(1, replace=True, running="move", kv_cache=kv_cache)
    assert answer["moved"] == 4
    had = twice.count
    sent_back = kv_cache == "recompute" and mode != "retract"
    assert answer["retracted"] == (5 if sent_back else 0)
    resume(server)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    # and nobody takes the new one from them
    pause(server, "in_place")
    assert "4 paused requests" in unload(server, policy.name)["message"]
    resume(server)
    *_, last = policy.expect_all(running, 0, 1)
    assert last.meta["num_retractions"] == (1 if sent_back or mode == "retract" else 0)
    (output,) = expect_all_go_on(plain)
    assert "adapter_versions" not in output.meta
    twice.wait_for_tokens(had)
    ask(server, "POST", "/abort_request", {"abort_all": True})
    for output in twice.outputs():
        policy.expect(output, 0, 1)
    # what two adapters have computed is nobody else's, and what one has is
    (again,) = policy.start(1, input_ids=shared, tokens=4)
    cached = again.output().meta["cached_tokens"]
    kept = kv_cache == "fence" and mode != "retract"
    assert cached == (0 if kept else len(shared) - 1)
    policy.expect(again.output(), 1)


@on("overlap", "workers")
def test_a_waiting_request_moves(server: Server) -> None:
    """An abort that finds it in the queue says who made the tokens that it had."""
    policy = Policy(server, None)
    policy.load(0)
    (running,) = policy.start(1)
    pause(server, "retract")
    (had,) = settle(server, [running])
    (fresh,) = start(server, 1, tokens=3, lora_path=policy.name)
    until("both wait", lambda: status(server)["waiting"] == 2)
    assert policy.load(1, replace=True, running="move")["moved"] == 2
    running.abort()
    output = running.output()
    assert len(output.tokens) == had
    policy.expect(output, 0)
    resume(server)
    policy.expect(fresh.output(), 1)


@on("overlap", "workers")
def test_requests_that_are_on_their_way_follow(server: Server) -> None:
    """SGLang has looked their adapter up, and sends them when their prompt was computed."""
    policy = Policy(server, None)
    policy.load(0)
    before = unloadings(server)
    pause(server, "in_place")
    (twice,) = start(server, 1, tokens=ENDLESS, lora_path=policy.name, n=2)
    until("their prompt waits", lambda: status(server)["waiting"] == 1)
    assert policy.load(1, replace=True, running="move", kv_cache="fence")["moved"] == 1
    assert unloadings(server) == before
    resume(server)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    twice.wait_for_tokens(twice.count + 1)
    ask(server, "POST", "/abort_request", {"abort_all": True})
    for output in twice.outputs():
        assert output.tokens[-1] == lora.token(1)
        told = lora.spans_by_tokens(output.tokens, policy.name, policy.versions)
        assert output.meta["adapter_versions"] == told


@on("overlap", "normal", "workers")
def test_an_adapter_that_cannot_be_used(server: Server, name: str) -> None:
    """It is refused when it comes, and not when a request needs it: that ends SGLang."""
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    good = lora.tensors(0)
    down, up = good
    for wrong, config, why in (
        ({**good, down: good[down][:, :-1].clone()}, {}, "shape"),
        ({**good, up: good[up][:-1].clone()}, {}, "shape"),
        ({down: good[down]}, {}, "fit"),
        (lora.tensors(0, module="none"), {}, "none"),
        (good, {"target_modules": ["q_proj"]}, "--lora-target-modules"),
        (good, {"r": 2 * RANK}, "--max-lora-rank"),
    ):
        for fields in ({"lora_name": name, "replace": True}, {"lora_name": new_name()}):
            body = lora.tensor_body(wrong, **config) | fields
            refused = server.post("/load_lora_adapter_from_tensors", body)
            assert refused["status_code"] == 400, (why, refused)
            assert why in refused["message"], refused
            assert refused["error_message"] == refused["message"]
            assert loaded(server) == {name}
    expect_all_go_on(running)


@on("overlap", "normal", "workers")
def test_without_replace(server: Server, name: str, folders: list[Path]) -> None:
    """As SGLang has it, however the name came to its adapter; and what makes no sense."""
    policy = Policy(server, None)
    policy.load(0)
    for _ in range(2):
        refused = policy.try_to_load(1)
        assert refused["status_code"] == 400, refused
        assert "already loaded" in refused["error_message"]
        policy.load(0, replace=True)
    for fields, why in (
        ({"running": "move"}, "replace"),
        ({"replace": True, "kv_cache": "fence"}, "move"),
        ({"replace": True, "running": "fly"}, "running"),
        ({"adapter_version": "a\nb"}, "printable"),
    ):
        refused = policy.try_to_load(1, **fields)
        assert refused["status_code"] == 400, refused
        assert why in refused["message"]
    policy.expect_all(policy.start(1), 0)


@on("overlap")
def test_versions_that_nobody_names(server: Server) -> None:
    policy = Policy(server, None)
    answers = [policy.try_to_load(n, replace=True) for n in (0, 1)]
    first, second = (int(answer["adapter_version"]) for answer in answers)
    assert first < second
    policy.versions[1] = str(second)
    policy.expect_all(policy.start(1), 1)


@on("normal", "workers")
def test_no_room_for_another(server: Server, folders: list[Path]) -> None:
    """Nothing is unloaded for it, and old ones that requests use are counted."""
    policies = [Policy(server, folders) for _ in range(MAX_LOADED - 1)]
    for policy in policies:
        policy.load(0)
    running = policies[0].start(1)
    policies[0].load(1, replace=True)
    refused = policies[1].try_to_load(1, replace=True)
    assert refused["status_code"] == 409, refused
    assert f"--max-loaded-loras is {MAX_LOADED}" in refused["message"]
    assert loaded(server) == {policy.name for policy in policies}
    policies[1].expect_all(policies[1].start(1), 0)
    policies[0].expect_all(running, 0)
    until(
        "there is room again",
        lambda: policies[1].try_to_load(1, replace=True)["status_code"] == 200,
    )


@on("normal", "workers")
def test_no_room_in_a_pause(server: Server, folders: list[Path]) -> None:
    """SGLang unloads one to make room, and waits for its requests, which cannot end."""
    policies = [Policy(server, folders) for _ in range(MAX_LOADED)]
    running = []
    for policy in policies[:-1]:
        policy.load(0)
        running += policy.start(1)
    policies[-1].load(0)
    pause(server, "in_place")
    refused = Policy(server, folders).try_to_load(1)
    assert refused["status_code"] == 400, refused
    assert "1 paused request" in refused["message"]
    assert loaded(server) == {policy.name for policy in policies}
    resume(server)
    for policy, generation in zip(policies, running, strict=False):
        policy.expect_all([generation], 0)


@on("normal", "workers")
def test_an_adapter_that_made_room_comes_back(server: Server, folders: list[Path]) -> None:
    """SGLang loads it when a request asks for it, and it is the version that it was. What was
    used least recently makes room.
    """
    policies = [Policy(server, folders) for _ in range(MAX_LOADED + 1)]
    for policy in policies:
        policy.load(0)
    first, second, third, last = policies
    assert loaded(server) == {second.name, third.name, last.name}
    second.expect_all(second.start(1), 0)
    first.expect_all(first.start(1), 0)
    assert loaded(server) == {second.name, last.name, first.name}


# ---- several workers ---------------------------------------------------------------------


@on("workers")
def test_what_one_worker_loads_every_worker_finds(server: Server) -> None:
    policy = Policy(server, None)
    with contextlib.ExitStack() as stack:
        one, other = doors = [stack.enter_context(door(server, each)) for each in workers(server)]
        for number, (door_of_load, door_of_use) in enumerate(zip(doors, (other, one), strict=True)):
            body = lora.tensor_body(lora.tensors(number))
            body |= {"lora_name": policy.name, "replace": True}
            path = "/load_lora_adapter_from_tensors"
            version = ask(door_of_load, "POST", path, body)["adapter_version"]
            for each in doors:
                assert loaded(each) == {policy.name}
            policy.versions[number] = version
            (running,) = start_running(door_of_use, 1, tokens=3, lora_path=policy.name)
            policy.expect(running.output(), number)
        assert unload(one, policy.name, non_blocking=True)["success"]
        for each in doors:
            refused = each.post("/generate", {"input_ids": [1], "lora_path": policy.name})
            assert refused["status_code"] == 400, refused
            assert "never been loaded" in refused["error"]["message"]


@on("workers")
def test_more_adapters_than_fit_a_short_line(server: Server, adapter: Path) -> None:
    """asyncio reads lines of 64 KiB, unless it is told otherwise."""
    names = {f"{new_name()}-{'x' * 50_000}" for _ in range(2)}
    for name in names:
        body = {"lora_name": name, "lora_path": str(adapter)}
        ask(server, "POST", "/load_lora_adapter", body)
    for worker in workers(server):
        with door(server, worker) as one:
            assert loaded(one) == names
    (running,) = start_running(server, 1, tokens=ENDLESS, lora_path=min(names))
    pause(server, "in_place")
    assert "1 paused request" in unload(server, min(names))["message"]
    resume(server)
    expect_all_go_on([running])


@on("normal", "workers")
def test_a_request_of_an_adapter_that_is_nowhere(server: Server, folders: list[Path]) -> None:
    """SGLang loads what was unloaded again, and cannot where that came as tensors."""
    policy = Policy(server, None)
    policy.load(0)
    assert unload(server, policy.name)["success"]
    refused = server.post("/generate", {"input_ids": prompt(), "lora_path": policy.name})
    assert refused["status_code"] == 400, refused
    assert "implicitly load" in refused["error"]["message"]
    policy = Policy(server, folders)
    policy.load(0)
    assert unload(server, policy.name)["success"]
    policy.expect_all(policy.start(1), 0)


@on("workers")
def test_a_load_whose_worker_died_is_known(server: Server) -> None:
    """It is carried through, and nobody hears its answer."""
    policy = Policy(server, None)
    first, second = workers(server)
    (rank,) = schedulers(server.process.pid)
    begun = f"Start load Lora adapter from tensors. Lora name={policy.name}"
    with door(server, first) as one, door(server, second) as other, ThreadPoolExecutor() as threads:
        rank.suspend()
        body = {"lora_name": policy.name, **lora.tensor_body(lora.tensors(0))}
        loading = threads.submit(one.post, "/load_lora_adapter_from_tensors", body)
        until("it is begun", lambda: begun in server.log_text())
        first.kill()
        with pytest.raises(httpx.TransportError):
            loading.result()
        rank.resume()
        until("the other worker finds it", lambda: loaded(other) == {policy.name})
    until("there are two again", lambda: len(workers(server)) == 2)


@on("workers")
def test_requests_of_a_worker_that_died_keep_their_adapter(server: Server) -> None:
    """They run on, and nobody but the ranks knows of them."""
    policy = Policy(server, None)
    policy.load(0)
    first, _ = workers(server)
    with door(server, first) as one:
        start_running(one, 1, tokens=ENDLESS, lora_path=policy.name)
        first.kill()
    until("there are two again", lambda: len(workers(server)) == 2)
    pause(server, "in_place")
    refused = unload(server, policy.name)
    assert refused["status_code"] == 400, refused
    assert "1 requests of it have not ended" in refused["error_message"]
    resume(server)
    with ThreadPoolExecutor() as threads:
        before = unloadings(server)
        unloading = threads.submit(unload, server, policy.name)
        start_running(server, 1, tokens=ENDLESS)
        assert not unloading.done()
        assert unloadings(server) == before
        ask(server, "POST", "/abort_request", {"abort_all": True})
        assert unloading.result()["success"]
    assert unloadings(server) == before + 1


# ---- two ranks ---------------------------------------------------------------------------


@on("tp2")
@pytest.mark.parametrize("kv_cache", ["recompute", "fence"])
def test_both_ranks_move_a_request(server: Server, kv_cache: str) -> None:
    policy = Policy(server, None, ranks=2)
    policy.load(0)
    running = policy.start(2)
    assert policy.load(1, replace=True, running="move", kv_cache=kv_cache)["moved"] == 2
    policy.expect_all(running, 0, 1)


@on("tp2")
def test_a_shape_that_one_rank_sees(server: Server) -> None:
    """The other's part is whole, and its adapter is not left behind."""
    policy = Policy(server, None, ranks=2)
    policy.load(0)
    good = lora.tensors(1)
    down = next(iter(good))
    wrong = {**good, down: good[down][:, :-1].clone()}
    body = lora.tensor_body(wrong, ranks=2) | {"lora_name": "half", "adapter_version": "step 1"}
    for _ in range(2):
        refused = server.post("/load_lora_adapter_from_tensors", body)
        assert refused["status_code"] == 400, refused
        assert "do not fit" in refused["message"]
    body |= lora.tensor_body(good, ranks=2)
    assert server.post("/load_lora_adapter_from_tensors", body)["status_code"] == 200
    policy.expect_all(policy.start(1), 0)


# ---- Engine ------------------------------------------------------------------------------


def test_an_engine(pool: ServerPool, tmp_path: Path) -> None:
    pool.discard()
    model = lora.build_model(tmp_path / "model")
    answers = play("tests.support.lora_play", model, tmp_path)
    assert answers["refused"] == [False, True]
    for way in ("move", "async"):
        output = answers[way]
        told = lora.spans_by_tokens(output["tokens"], "policy", {0: "a", 1: "b", 2: "c"})
        assert output["spans"] == told
    assert [span["version"] for span in answers["move"]["spans"]] == ["a", "b"]
    assert [span["version"] for span in answers["async"]["spans"]] == ["c"]
    assert answers["unloaded"] == [True, False]


# ---- vLLM's trainers load an adapter again by its name -----------------------------------

OWN = marker.token(0)
# the first of all that have the same logit
OTHERS = 0
LOAD = ("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter")


def tokens_of(server: Server, name: str) -> list[int]:
    body = {
        "model": name,
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    answer = ask(server, "POST", "/inference/v1/generate", body)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@on("overlap", "workers")
@pytest.mark.parametrize("path", LOAD)
@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_name_passes_to_another_adapter(
    server: Server, adapter: Path, other_adapter: Path, path: str, paused: bool
) -> None:
    """Requests that run end with the adapter they began with, and nobody waits for them."""
    name = f"policy-{next(_serial)}"
    ask(server, "POST", path, {"lora_name": name, "lora_path": str(adapter)})
    assert tokens_of(server, name) == [OWN] * 3
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    before = unloadings(server)
    if paused:
        pause(server, "in_place")
    for step in range(2):
        folder = (other_adapter, adapter)[step]
        answer = ask(server, "POST", path, {"lora_name": name, "lora_path": str(folder)})
        assert answer["loaded_adapters"][name] == str(folder)
        if not paused:
            assert tokens_of(server, name) == [(OTHERS, OWN)[step]] * 3
    resume(server)
    assert tokens_of(server, name) == [OWN] * 3
    for output in expect_all_go_on(running):
        assert set(output.tokens) == {OWN}
    until("both old ones are unloaded", lambda: unloadings(server) == before + 2)
    assert ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name})["success"]
    body = {"model": name, "token_ids": prompt(), "sampling_params": {"max_tokens": 1}}
    refused = server.post("/inference/v1/generate", body)
    assert refused["status_code"] == 404, refused
    assert f"'{name}'" in refused["error"]["message"]


@on("overlap")
def test_an_adapter_that_does_not_fit(server: Server, name: str, tmp_path: Path) -> None:
    """The name stays with the one that it has."""
    large = lora.write(tmp_path / "large", lora.uniform(-10.0, rank=2 * RANK), r=2 * RANK)
    body = {"lora_name": name, "lora_path": str(large)}
    refused = server.post("/skyrl/v1/load_lora_adapter", body)
    assert refused["status_code"] == 400, refused
    assert "rank" in refused["error"]["message"]
    assert tokens_of(server, name) == [OWN] * 3
    assert unload(server, name)["success"]


@on("overlap")
def test_what_trl_reads_before_it_sends_adapters(server: Server) -> None:
    config = server.get("/server_info?config_format=json")["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": RANK, "max_loras": 4, "max_cpu_loras": None}


# ---- an adapter's name as a model's ------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLING = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": prompt(), **SAMPLING, **fields}
    return {"messages": [{"role": "user", "content": "t5"}], **SAMPLING, **fields}


def words_of(server: Server, path: str, **fields: Any) -> list[str]:
    choice = ask(server, "POST", path, body_for(path, **fields))["choices"][0]
    text: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text.split()


@on("overlap", "workers")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_model_that_is_an_adapter_is_served_by_it(
    server: Server, folders: list[Path], path: str
) -> None:
    """By its name alone, and by SGLang's form of a model's adapter; by no name of the model."""
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    for number, folder in enumerate(folders[:2]):
        body = {"lora_name": f"policy-v{number}", "lora_path": str(folder)}
        ask(server, "POST", "/load_lora_adapter", body)
    for number in range(2):
        name, said = f"policy-v{number}", [f"t{lora.token(number)}"] * 3
        for model in (name, f"{served}:{name}", f"default:{name}"):
            assert words_of(server, path, model=model) == said
        assert words_of(server, path, model=served, lora_path=name) == said
        # bench_serving's, and vLLM's clients that were taught SGLang's field
        assert words_of(server, path, model=name, lora_path=name) == said
    for fields in ({}, {"model": served}, {"model": "default"}, {"model": ""}):
        assert words_of(server, path, **fields) == [f"t{OWN}"] * 3
    body = body_for(path, model="policy-v0", lora_path="policy-v1")
    refused = server.post(path, body)
    assert refused["status_code"] == 400, refused
    assert "'policy-v1'" in refused["error"]["message"]


@on("overlap", "workers")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_model_that_nobody_knows_is_an_error(server: Server, name: str, path: str) -> None:
    """As OpenAI's clients know it, for each name that was an adapter's or a checkpoint's."""
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    assert unload(server, name, non_blocking=True)["success"]
    for model in (name, f"{served}:{name}", "gpt-4", served + "x"):
        refused = server.post(path, body_for(path, model=model))
        assert refused["status_code"] == 404, refused
        error = refused["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert repr(model) in error["message"]
        assert repr(served) in error["message"] or name in model
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.completions.create(model="gpt-4", prompt=prompt(), max_tokens=1)


@on("overlap")
def test_an_adapter_that_has_the_name_of_the_served_model(
    server: Server, folders: list[Path]
) -> None:
    """prime-rl loads its policy so, and asks for it so."""
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    body = {"lora_name": served, "lora_path": str(folders[1])}
    ask(server, "POST", "/load_lora_adapter", body)
    assert tokens_of(server, served) == [lora.token(1)] * 3
    for path in (COMPLETIONS, CHAT):
        assert words_of(server, path, model=served) == [f"t{lora.token(1)}"] * 3
        assert words_of(server, path) == [f"t{OWN}"] * 3


@on("overlap")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "t5"}),
        ("/v1/score", {"query": "t5", "items": ["t6"], "label_token_ids": [5]}),
    ],
)
def test_a_route_without_adapters_refuses_their_names(
    server: Server, name: str, path: str, body: dict[str, Any]
) -> None:
    """SGLang would answer with the model's own weights."""
    refused = server.post(path, {"model": name, **body})
    assert refused["status_code"] == 400, refused
    assert f"'{name}' is an adapter" in refused["error"]["message"]


@on("overlap")
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_route_finds_adapters(server: Server, folders: list[Path], stream: bool) -> None:
    load_as = {"lora_name": "claude", "lora_path": str(folders[0])}
    ask(server, "POST", "/load_lora_adapter", load_as)
    body = {"max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "t5"}]}
    answer = ask(server, "POST", "/v1/messages", {"model": "claude", **body})
    assert answer["content"][0]["text"].split()[0] == f"t{lora.token(0)}"
    refused = server.post("/v1/messages", {"model": "claude-9", **body, "stream": stream})
    assert refused["status_code"] == 400, refused
    assert "'claude-9' does not exist" in refused["error"]["message"]


@on("overlap")
def test_trls_rollouts_are_of_the_adapter_that_it_loaded_last(
    server: Server, folders: list[Path]
) -> None:
    """It loads each step's under a name of its own, and requests of the step before still run."""
    for step in range(2):
        name = f"trl-policy-v{step}"
        body = {"lora_name": name, "lora_path": str(folders[step]), "load_inplace": False}
        ask(server, "POST", "/v1/load_lora_adapter", body)
        for asked in range(step + 1):
            body = trl.rollout(f"trl-policy-v{asked}", prompt(), temperature=0.01, max_tokens=3)
            tokens, _ = trl.read_rollout(ask(server, "POST", COMPLETIONS, body))
            assert tokens == [lora.token(asked)] * 3
    ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "trl-policy-v0"})
    assert server.post(COMPLETIONS, trl.rollout("trl-policy-v0", prompt()))["status_code"] == 404
