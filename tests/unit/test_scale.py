"""The model of updates at scale agrees with its page, its sources, our settings and physics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import scale
from benchmarks.scale import (
    CPU_PACE,
    DEPLOYMENTS,
    H100,
    MODELS,
    NO_ROOM,
    PACKAGE,
    PAGE,
    SHARES,
    Constant,
    Deployment,
    Form,
    Parts,
    Status,
)
from harness.starting import ROOT
from sglang_inflight.client.shard_sender import BUCKET_BYTES
from sglang_inflight.messages import PartsSource
from sglang_inflight.scheduler.groups.groups import WINDOW_BYTES
from sglang_inflight.scheduler.plans import audit
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import RateLimit, choose_rate
from sglang_inflight.scheduler.update.sources import reading
from sglang_inflight.scheduler.update.swap import SPARE_BYTES
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.regions import Region
from tests.support import rank as ranks
from tests.support.rank import Rank

each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each.name)


def test_page_differs_from_what_the_model_writes() -> None:
    page = PAGE.read_text()
    assert scale.written(page) == page, "run python -m benchmarks.scale --write"


def test_page_without_a_marker_is_written() -> None:
    page = PAGE.read_text().replace("<!-- end of scale: stall -->", "")
    with pytest.raises(ValueError, match="<!-- scale: stall -->"):
        scale.written(page)


def test_constant_without_a_source() -> None:
    found = scale.constants() | {"nvlink of an H800": scale.H800.nvlink}
    assert not [name for name, constant in found.items() if not _has_source(constant)]
    sources = [model.source for model in MODELS] + [each.source for each in scale.published()]
    assert all("https://" in source for source in sources)


def _has_source(constant: Constant) -> bool:
    """Return whether its source is an address or a file that exists, or says that it is assumed."""
    source = constant.source
    if constant.status is Status.ASSUMED:
        return source.startswith("assumed")
    files = re.findall(r"[\w/]+\.(?:py|md)", source)
    is_ours = any((ROOT / file).exists() for file in files)
    if constant.status is Status.PUBLISHED:
        return "https://" in source or source.startswith("SGLang 0.5") or is_ours
    return is_ours


def test_constant_settled_by_no_step_of_the_kit() -> None:
    steps = {
        constant.settled_by.split(":")[0]
        for constant in scale.constants().values()
        if constant.settled_by
    }
    assert steps
    assert not [step for step in steps if not (ROOT / f"benchmarks/gpu/steps/{step}.py").exists()]


def test_model_has_other_settings_than_the_package() -> None:
    assert PACKAGE.pace.value == choose_rate(None, torch.device("cuda"))
    assert choose_rate(None, torch.device("cpu")) == CPU_PACE
    assert PACKAGE.interpreter_share.value == Settings().pace_interpreter
    assert PACKAGE.spare.value == SPARE_BYTES
    assert PACKAGE.buffers.value == WINDOW_BYTES
    assert PACKAGE.bucket.value == BUCKET_BYTES


@each_deployment
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("share", SHARES)
def test_stall_is_shorter_than_its_bytes_take(
    deployment: Deployment, form: Form, share: float
) -> None:
    least = scale.moved(deployment, form, share).least_s(H100)
    assert scale.stall_s(deployment, form, share) >= least + PACKAGE.commit.value


@each_deployment
@pytest.mark.parametrize("form", [Form.CHANGES, Form.DEVICE, Form.HOST])
def test_commit_moves_fewer_bytes_than_change(deployment: Deployment, form: Form) -> None:
    for share in SHARES:
        moved = scale.moved(deployment, form, share)
        assert moved.memory + moved.to_card >= share * deployment.card_bytes


@each_deployment
def test_more_changes_stall_for_less_time(deployment: Deployment) -> None:
    # at most half: there whole ranges begin, which need no sectors
    shares = [share / 1000 for share in range(1, 501)]
    stalls = [scale.stall_s(deployment, Form.CHANGES, share) for share in shares]
    assert all(few <= many for few, many in pairwise(stalls))


class Counting(RateLimit):
    """Counts the bytes that staging spends."""

    def __init__(self) -> None:
        super().__init__(0, lambda: False)
        self.spent = 0

    def spend(self, nbytes: int) -> None:
        self.spent += nbytes


class Half(nn.Module):
    """A rank's half of a tensor. Another tensor is another rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "both halves":
                self.kept.data.copy_(tensor[:4])


each_form = pytest.mark.parametrize(
    ("mode", "form"),
    [(StagingMode.CHANGES, Form.CHANGES), (StagingMode.DEVICE, Form.DEVICE)],
)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The limit of each rank, without an audit's bytes."""
    limit = Counting()
    monkeypatch.setattr(Rank, "plans", True)
    monkeypatch.setattr(ranks, "UNPACED", limit)
    monkeypatch.setattr(audit, "_MOST_TENSORS", 0)
    return limit


SENT = {
    "both halves": torch.ones(8, 6, dtype=torch.bfloat16),
    "another's": torch.ones(3, 5, dtype=torch.bfloat16),
}
CARD: Any = SimpleNamespace(
    total_bytes=2 * (8 * 6 + 3 * 5), taken_bytes=2 * 8 * 6, card_bytes=2 * 4 * 6
)


@each_form
def test_model_counts_other_bytes_for_the_pace_than_staging(
    mode: StagingMode, form: Form, limit: Counting
) -> None:
    with torch.no_grad():
        rank = Rank(mode, Half(), checkpoint_shapes={n: t.shape for n, t in SENT.items()})
        update = rank.begin()
        rank.prepare(update)
        limit.spent = 0
        rank.fill(update, SENT)
    assert limit.spent == scale.touched_bytes(CARD, form)


@each_form
def test_model_counts_other_bytes_of_parts_than_staging(
    mode: StagingMode, form: Form, limit: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(_: object, __: object, parts: Mapping[str, Region], *___: object) -> Any:
        assert parts.keys() == {"both halves"}
        yield from ((name, SENT[name][region.slices()]) for name, region in parts.items())

    monkeypatch.setattr(reading, "WIRES", [lambda _: ("test", receive)])
    with torch.no_grad():
        rank = Rank(mode, Half(), checkpoint_shapes={n: t.shape for n, t in SENT.items()})
        kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in SENT.items()}
        rank.shadowed.findings._kinds = kinds
        update = rank.begin()
        rank.prepare(update)
        limit.spent = 0
        rank.fill_from(update, PartsSource(wire="test", body=b"", group_name=""))
    assert limit.spent == scale.touched_by_parts(CARD, form)


@each_deployment
def test_staging_is_faster_than_its_transport_and_its_paces(deployment: Deployment) -> None:
    staged = scale.staging(deployment)
    assert staged.total_s >= deployment.total_bytes / PACKAGE.broadcast.value
    assert staged.total_s >= deployment.total_bytes / PACKAGE.pace.value
    share = PACKAGE.interpreter_share.value
    assert staged.total_s >= deployment.tensors * PACKAGE.tensor_planned.value / share


@each_deployment
def test_parts_bring_a_card_more_than_it_keeps(deployment: Deployment) -> None:
    staged = scale.sharded(deployment)
    assert staged.transport_s == deployment.card_bytes / H100.nic.value
    assert staged.total_s <= scale.staging(deployment).total_s
    assert deployment.finished_tensors < deployment.own_tensors <= deployment.tensors


@each_deployment
def test_further_server_adds_more_than_a_bucket_or_less_than_a_copy(deployment: Deployment) -> None:
    def transport_s(parts: Parts) -> float:
        return scale.sharded(deployment, parts=parts).transport_s

    alone = transport_s(Parts())
    hop = transport_s(Parts(servers=2)) - alone
    assert hop == pytest.approx(PACKAGE.bucket.value / H100.nic.value)
    assert transport_s(Parts(servers=2, relays=False)) == pytest.approx(2 * alone)


@each_deployment
def test_each_further_change_toward_the_goal_makes_staging_slower(deployment: Deployment) -> None:
    of = {
        name: scale.sharded(deployment, parts=parts).total_s
        for name, parts in scale.VARIANTS.items()
    }
    changes = [*list(of)[list(of).index("at a pace of 350 GB/s") :]]
    for before, after in pairwise(["as built", *changes]):
        assert of[after] <= of[before]
    assert of["as built"] <= of["a trainer by FSDP2"]
    assert of["as built"] <= of["4 servers"] <= of["4 servers, no relays"]


@each_deployment
def test_digest_is_faster_than_the_link(deployment: Deployment) -> None:
    least = deployment.card_bytes / H100.from_card.value
    for readers in (1, 2, 3, 4, 100):
        assert scale.sharded(deployment, parts=Parts(readers=readers)).digest_s >= least


@each_deployment
def test_card_takes_fewer_bytes_than_it_keeps_or_more_than_come(deployment: Deployment) -> None:
    assert deployment.card_bytes <= deployment.taken_bytes <= deployment.total_bytes
    assert deployment.finished_bytes < deployment.card_bytes
    assert deployment.finished_tensors < deployment.tensors


@each_deployment
def test_whole_copies_touch_fewer_bytes_than_come_or_more_than_changes(
    deployment: Deployment,
) -> None:
    copies = scale.touched_bytes(deployment, Form.DEVICE)
    least = deployment.total_bytes + deployment.card_bytes
    assert least <= copies <= scale.touched_bytes(deployment, Form.CHANGES)


@each_deployment
def test_first_update_is_as_short_as_later_ones(deployment: Deployment) -> None:
    fast = scale.first_s(deployment, tensor_s=PACKAGE.tensor_at_best.value)
    assert 0 < fast <= scale.first_s(deployment)
    # a proof by SGLang's own finishing comes on top
    assert (fast < scale.first_s(deployment)) == deployment.is_finished


def test_longer_staging_leaves_tokens_as_young() -> None:
    ages = [scale.staleness(staged_s, 0.01) for staged_s in (0.5, 1, 10, 100)]
    for younger, older in pairwise(ages):
        assert younger.age_s < older.age_s
        assert younger.tokens < older.tokens
        assert younger.train_steps < older.train_steps


@each_deployment
@pytest.mark.parametrize("form", Form)
def test_what_fits_takes_more_than_the_card(deployment: Deployment, form: Form) -> None:
    for share in SHARES:
        memory = scale.memory(deployment, form, share)
        assert memory.static + memory.headroom == pytest.approx(H100.card.value)
        assert memory.weights + memory.copy + memory.kv == pytest.approx(memory.static)
        if memory.fits:
            assert memory.weights + memory.copy + memory.open < H100.card.value


def test_row_hides_that_a_copy_does_not_fit() -> None:
    stalls = next(table for table in scale.tables() if table.name == "stall")
    column = list(stalls.columns).index("`device`")
    cells = {row[0]: row[column] for row in stalls.rows}
    fits = {each.name: scale.memory(each, Form.DEVICE, scale.ONE_STEP).fits for each in DEPLOYMENTS}
    assert {name: cell != NO_ROOM for name, cell in cells.items()} == fits
    assert set(fits.values()) == {True, False}


def test_smaller_card_holds_as_much() -> None:
    deployment = DEPLOYMENTS[0]
    small = replace(H100, card=replace(H100.card, value=deployment.card_bytes))
    assert not scale.memory(deployment, Form.CHANGES, scale.ONE_STEP, small).fits
    assert scale.memory(deployment, Form.CHANGES, scale.ONE_STEP).fits


def test_experts_have_more_parameters_than_their_model() -> None:
    for model in MODELS:
        assert 0 <= model.expert_parameters < model.parameters
