"""A model of Kimi K2's number of tensors is updated from each source, and equals a fresh load."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.utils.weight_checker import WeightChecker

from harness.server import serve
from sglang_inflight.messages import DiskSource, DistributedSource, IPCSource, Source, TensorSource
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources.stretch import take_none
from sglang_inflight.vocabulary.sparse import INDICES, VALUES
from tests.families import row
from tests.families import tensors as loaded
from tests.families.families import ABSORBED, Family
from tests.support import many_tensors
from tests.support.checkpoint_engine import checkpoint_engine
from tests.support.load import ENDLESS, more_tokens, start_running, status
from tests.support.many_tensors import BF16, FP8, Many
from tests.support.rank import Rank
from tests.support.updates import by_reference, flatten, succeed

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
GROUP, BUCKET_BYTES = "trainer", 16 << 20
# versions of the checkpoint, and the first one with a change in each tensor of bfloat16
CHANGED = 2
UPDATE_TIMEOUT_S = 240
FORMS = [StagingMode.DEVICE, StagingMode.CHANGES]


class Served:
    """A loaded model with its plan, and ranks that serve it in each form."""

    def __init__(self, many: Many, folder: Path) -> None:
        self.folders = [folder / f"v{version}" for version in range(CHANGED + 1)]
        self.weights = [many_tensors.tensors(many, version) for version in range(CHANGED)]
        self.weights.append(many_tensors.changed(self.weights[0]))
        for path, weights in zip(self.folders, self.weights, strict=True):
            many_tensors.write(path, many, weights)
        self.model, self._config = loaded.load(self.folders[0], Family())
        self.expected = [loaded.tensors_of(self.model)]
        for path in self.folders[1:]:
            self.expected.append(loaded.tensors_of(loaded.load(path, Family())[0]))
        self._finishing = loaded.find_finishing(self.model, self._config, self.weights[0])
        self.plan = loaded.plan_of(self.model, self._finishing, self.weights[0])
        self._ranks: dict[StagingMode, Rank] = {}
        self.version = 0

    def rank(self, mode: StagingMode) -> Rank:
        if mode not in self._ranks:
            shapes = {name: tensor.shape for name, tensor in self.weights[0].items()}
            rank = Rank(mode, self.model, checkpoint_shapes=shapes)
            rank.shadowed.findings.pristine, rank.shadowed.findings.recipe = self._finishing
            rank.shadowed.findings.plan = self.plan
            rank.shadowed.runner.model_config = self._config
            self._ranks[mode] = rank
        return self._ranks[mode]

    def update(self, rank: Rank, version: int, source: Callable[[Tensors, Path], Any]) -> None:
        """Update whole, and compare all bytes."""
        weights, update = self.weights[version], rank.begin()
        rank.prepare(update)
        with source(weights, self.folders[version]) as (sent, groups):
            rank.fill_from(update, sent, groups)
        assert update.tensors == len(weights)
        rank.seal(update)
        rank.commit(update)
        self.version = version
        self.expect(version)

    def expect(self, version: int) -> None:
        assert not loaded.differences(loaded.tensors_of(self.model), self.expected[version])


@pytest.fixture(scope="module", params=[FP8, BF16], ids=["fp8", "bf16"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    with torch.no_grad():
        return Served(request.param, tmp_path_factory.mktemp("many"))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


# ---- sources -------------------------------------------------------------------------

# a source, and the trainers' groups that it needs
Sent = Iterator[tuple[Source, Any]]


@contextmanager
def disk(weights: Tensors, folder: Path) -> Sent:
    yield DiskSource(model_path=str(folder)), None


def handles(content: Any) -> bytes:
    """Return a payload with a handle to each shared memory in ``content``."""
    return base64.b64decode(by_reference(content))


@contextmanager
def by_value(weights: Tensors, folder: Path) -> Sent:
    """Torch pickles no FP8 by value, so that comes in views of one shared memory."""
    if all(tensor.itemsize > 1 for tensor in weights.values()):
        payload = pickle.dumps([*weights.items()])
    else:
        flat = flatten(weights)
        shared = flat["flattened_tensor"].share_memory_()
        payload = handles(
            [
                (each.name, shared[each.start_idx : each.end_idx].view(each.dtype).view(each.shape))
                for each in flat["metadata"]
            ]
        )
    yield TensorSource(serialized_named_tensors=[payload]), None


@contextmanager
def bucket(weights: Tensors, folder: Path) -> Sent:
    source = TensorSource(
        serialized_named_tensors=[handles(flatten(weights))], load_format="flattened_bucket"
    )
    yield source, None


class Broadcasts:
    """A group in which broadcasts come without a wire."""

    def __init__(self, weights: Tensors) -> None:
        self._weights = weights

    def get(self, name: str) -> Broadcasts:
        assert name == GROUP
        return self

    def receives_on(self, device: torch.device) -> torch.device:
        return device

    def receive_each(
        self, expected: Any, check: Callable[[], None], transfer_id: str | None
    ) -> Iterator[Any]:
        for _, tensors in expected:
            for name, tensor in tensors(take_none):
                tensor.view(torch.uint8).copy_(self._weights[name].view(torch.uint8))
            yield tensors

    def mark_taken(self, transfer_id: str) -> None:
        pass


@contextmanager
def broadcast(weights: Tensors, folder: Path) -> Sent:
    # wide elements first: the next ones must not begin amid one
    ordered = sorted(weights.items(), key=lambda pair: -pair[1].itemsize)
    yield (
        DistributedSource(
            names=[name for name, _ in ordered],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            shapes=[list(tensor.shape) for _, tensor in ordered],
            group_name=GROUP,
            load_format="flattened_bucket",
            bucket_bytes=BUCKET_BYTES,
        ),
        Broadcasts(weights),
    )


@contextmanager
def ipc(weights: Tensors, folder: Path) -> Sent:
    with checkpoint_engine(weights) as (engine, addresses):
        yield IPCSource(zmq_handles=addresses), None
    assert engine.finished, engine.error


# ---- updates -------------------------------------------------------------------------


def test_all_but_mlas_products_are_planned(served: Served) -> None:
    assert len(served.weights[0]) > 138_000
    assert {name for name in served.plan.by_loader if ".kv_b_proj." not in name} == set()


@pytest.mark.parametrize("mode", FORMS, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("source", [disk, by_value, bucket, broadcast, ipc])
def test_whole_update_equals_a_fresh_load(served: Served, source: Any, mode: StagingMode) -> None:
    served.update(served.rank(mode), 1 - served.version, source)


@pytest.mark.parametrize("mode", FORMS, ids=lambda mode: mode.name.lower())
def test_sparse_update_equals_a_fresh_load(served: Served, mode: StagingMode) -> None:
    rank = served.rank(mode)
    served.update(rank, 0, disk)
    before, after = served.weights[0], served.weights[CHANGED]
    parts: Tensors = {}
    for name, tensor in after.items():
        at = (tensor.view(torch.uint8) != before[name].view(torch.uint8)).any()
        if at:
            found = (tensor != before[name]).view(-1).nonzero().view(-1)
            parts |= {name + INDICES: found, name + VALUES: tensor.view(-1)[found]}
    assert len(parts) == 2 * sum(tensor.dtype == torch.bfloat16 for tensor in after.values())
    rank.update_sparse(parts, after)
    served.version = CHANGED
    served.expect(CHANGED)
    served.update(rank, 0, disk)


# ---- a server ------------------------------------------------------------------------


def test_server_updated_under_requests_serves_a_fresh_load(tmp_path: Path) -> None:
    folders = [
        many_tensors.write(tmp_path / f"v{version}", BF16, many_tensors.tensors(BF16, version))
        for version in range(2)
    ]
    fresh, _ = loaded.load(folders[1], Family())
    expected = WeightChecker(get_model=lambda: fresh).handle("checksum", role="target")
    assert expected is not None
    env = {**row.ENV, **ABSORBED, "SGLANG_INFLIGHT_STAGING": "changes"}
    # a search at the first update would outlast the call
    env["SGLANG_INFLIGHT_PROOF"] = "start"
    with serve(folders[0], *row.FLAGS, log=tmp_path / "log", env=env) as server:
        running = start_running(server, 1, tokens=ENDLESS)
        body = {"model_path": str(folders[1]), "non_blocking": True, "kv_cache": "keep"}
        answer = server.post("/update_weights_from_disk", body, timeout=UPDATE_TIMEOUT_S)
        assert succeed(answer)["staged_as"]["form"] == "changes"
        more_tokens(running)
        served = succeed(server.post("/weights_checker", {"action": "checksum"}))
        assert served["ranks"][0]["checksums"] == expected["checksums"]
        ways = status(server)["ranks"][0]["staging"]["ways"]["target"]
        assert ways["planned"]["tensors"] > 138_000
        assert ways["by_loader"]["tensors"] == 0
