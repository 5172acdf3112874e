"""A proof that fails for a passing reason is made anew, and one that takes long begins once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.utils import set_weight_attrs
from torch import nn

from sglang_inflight.frontend.updates import two_phase
from sglang_inflight.messages import DiskSource, Failed, OpenCall
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.update import findings
from sglang_inflight.scheduler.update.finished.places import tensors_of
from sglang_inflight.scheduler.update.finished.proof import NotNow, find_recipe
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.bodies import TensorBody
from sglang_inflight.vocabulary.errors import Dropped, Refused, Unproven
from tests.support.front_end import FrontEnd
from tests.support.front_end import no_arguments as no_arguments
from tests.support.rank import CPU, Rank
from tests.support.ticks import run
from tests.unit.finishing import Finish, Finishing

RECIPE = Recipe(
    names={},
    untouched=frozenset(),
    tensors=frozenset(),
    numbers=frozenset(),
    awaited=frozenset(),
)
WEIGHT = {"weight": torch.ones(2, 2)}
HANGS_S = 30.0


class Layer(nn.Module):
    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": default_weight_loader})
        self.quant_method = Finishing(finish)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def double(layer: Any) -> None:
    layer.doubled = layer.weight.data * 2


class Search:
    """A model's search that finds the same recipe, or the same error, each time."""

    def __init__(self, *outcomes: Recipe | Exception) -> None:
        self._outcomes = list(outcomes)
        self.begun = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self.was_stopped = threading.Event()

    def __call__(
        self, pristine: Any, device: Any, require_wanted: Callable[[], None], *rest: Any
    ) -> Recipe:
        self.begun += 1
        while not self.may_end.wait(0.01):
            try:
                require_wanted()
            except Dropped:
                self.was_stopped.set()
                raise
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def rank_with(search: Search, mode: StagingMode = StagingMode.DEVICE) -> Rank:
    rank = Rank(mode, Layer(double), checkpoint_shapes={"weight": (2, 2)})
    shadowed: Any = rank.shadowed
    shadowed.findings.pristine = Layer(double)
    shadowed.findings._find_recipe = search
    return rank


def prove(model: ShadowedModel, *, again: bool = False, check: Any = lambda: None) -> None:
    model.findings.prove(CPU, check, UNPACED, {}, again=again)


def state_of(model: ShadowedModel) -> str:
    assert model.findings.proof is not None
    return model.findings.proof.state


def why_of(model: ShadowedModel) -> str | None:
    assert model.findings.proof is not None
    return model.findings.proof.why


def test_passing_reason_is_asked_for_again_and_no_sooner_than_told() -> None:
    search = Search(NotNow("no room"), NotNow("still none"), RECIPE)
    model = rank_with(search).shadowed
    for again, why, begun in [
        (True, "no room", 1),
        (False, "no room", 1),
        (True, "still none", 2),
    ]:
        with pytest.raises(Unproven, match=why):
            prove(model, again=again)
        assert search.begun == begun
        assert why_of(model) == why
    prove(model, again=True)
    assert state_of(model) == "done"


def test_difference_is_not_asked_for_again() -> None:
    search = Search(Unproven("other values"))
    model = rank_with(search).shadowed
    for _ in range(2):
        with pytest.raises(Unproven, match="other values"):
            prove(model, again=True)
    assert search.begun == 1
    assert not model.findings.may_be_proven_later


def test_search_goes_on_past_the_update_that_began_it() -> None:
    search = Search(RECIPE)
    search.may_end.clear()
    model = rank_with(search).shadowed

    def out_of_time() -> None:
        raise Dropped("the update's time ran out")

    for _ in range(2):
        with pytest.raises(Dropped, match="goes on: send the update again"):
            prove(model, check=out_of_time)
    assert state_of(model) == "due"
    search.may_end.set()
    prove(model)
    assert search.begun == 1
    assert state_of(model) == "done"


def test_search_is_stopped_before_an_update_writes_the_weights_in_place() -> None:
    search = Search(RECIPE)
    search.may_end.clear()
    rank = rank_with(search)

    def out_of_time() -> None:
        raise Dropped("the update's time ran out")

    with pytest.raises(Dropped):
        prove(rank.shadowed, check=out_of_time)
    opened: Any = SimpleNamespace(
        update_id="u", partial=True, may_be_empty=False, in_place=True, asks_digests=False
    )
    rank._jobs.prepare(Update(opened, base_version=""), None, after=None)
    assert search.was_stopped.wait(HANGS_S)
    search.may_end.set()
    prove(rank.shadowed)
    assert search.begun == 2


def test_model_written_in_place_is_compared_with_no_checkpoint_until_one_comes() -> None:
    """The served weights differ from the checkpoint then, which says nothing of finishing."""
    search = Search(RECIPE)
    rank = rank_with(search, StagingMode.OFF)
    model = rank.shadowed
    rank.update(WEIGHT)
    with pytest.raises(Unproven, match="A whole update from disk"):
        prove(model, again=True)
    disk = DiskSource(model_path="/v1")
    for is_partial in (True, False):
        assert search.begun == 0
        with pytest.raises(Unproven):
            prove(model, again=True)
        model.begin(is_partial=is_partial)
        model.load(
            disk,
            iter(WEIGHT.items()),
            takes_all=True,
            check_finite=False,
            rate_limit=UNPACED,
            check=lambda: None,
        )
        # half written, as far as is known
        with pytest.raises(Unproven):
            prove(model, again=True)
        model.seal(was_loaded=True)
        model.note_commit(rolls_back=False)
    prove(model, again=True)
    assert search.begun == 1


def found(finish: Finish, weights: Iterable[tuple[str, torch.Tensor]], host: int = 1 << 30) -> None:
    live = Layer(double)
    live.load_weights(WEIGHT.items())
    double(live)
    loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
    find_recipe(Layer(finish), live, CPU, weights, UNPACED, host, loaded)


def unreadable() -> Iterable[tuple[str, torch.Tensor]]:
    yield from WEIGHT.items()
    try:
        raise OSError(5, "Input/output error")
    except OSError as error:
        raise Refused("checkpoint /v0 cannot be read: Input/output error") from error


def runs_out(words: str, kind: type[RuntimeError] = RuntimeError) -> Finish:
    def finish(layer: Any) -> None:
        raise kind(words)

    return finish


def test_no_room_and_unreadable_files_are_passing_reasons() -> None:
    found(double, WEIGHT.items())
    with pytest.raises(NotNow, match="MiB are free for this rank"):
        found(double, WEIGHT.items(), host=1)
    with pytest.raises(NotNow, match="Input/output error"):
        found(double, unreadable())
    for words, kind in [
        ("CUDA out of memory. Tried to allocate 1.4 GiB", torch.OutOfMemoryError),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate", RuntimeError),
        ("CUDA error: out of memory", RuntimeError),
    ]:
        with pytest.raises(NotNow):
            found(runs_out(words, kind), WEIGHT.items())


def test_finishing_without_a_kernel_is_no_passing_reason() -> None:
    with pytest.raises(Unproven, match="no kernel") as raised:
        found(runs_out("no kernel for this device"), WEIGHT.items())
    assert not isinstance(raised.value, NotNow)


class UnprovenFrontEnd(FrontEnd):
    """Its rank stages nothing, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        answer = self.rank.take

        def take(call: Any) -> Any:
            if isinstance(call, OpenCall) and not call.in_place:
                self.rank.told.append(call)
                failed = Failed(message="no room", error="Unproven")
                failed.call_id = call.call_id
                return [failed]
            return answer(call)

        self.rank.take = take  # type: ignore[method-assign]


@pytest.mark.usefixtures("no_arguments")
def test_front_end_lets_all_ranks_prove_again_in_the_same_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's own clock would have it prove while another refuses."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(two_phase, "time", clock)

    async def play() -> list[bool]:
        nonlocal now
        front = UnprovenFrontEnd()
        body = TensorBody(serialized_named_tensors=[b""], non_blocking=True)
        for passed in (0.0, 10.0, 10.0, two_phase._PROVE_AGAIN_S, 1.0):
            now += passed
            await front.call(body)
        opens = [c for c in front.rank.told if isinstance(c, OpenCall) and not c.in_place]
        return [call.proves_again for call in opens]

    assert run(play()) == [True, False, False, True, False]


# ---- searches for a load plan ------------------------------------------------------------


class PlanSearch:
    """A search for a plan that compares when it is told to, and then asks whether it is wanted."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.outcomes: list[str] = []
        # whether each search may compare with the served checkpoint
        self.compared: list[bool] = []

    def __call__(self, model: Any, weights: Any, kinds: Any, *rest: Any, **restrict: Any) -> Plan:
        _, serves_checkpoint, _, check, _ = rest
        self.begun += 1
        self.compared.append(serves_checkpoint())
        self.may_end.wait()
        try:
            check()
        except Dropped:
            self.outcomes.append("stopped")
            raise
        self.outcomes.append("found")
        return Plan(kinds, {}, {}, {})


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> tuple[PlanSearch, ShadowedModel]:
    search = PlanSearch()
    monkeypatch.setattr(findings, "find_plan", search)
    rank = Rank(StagingMode.DEVICE, Layer(double), checkpoint_shapes={"weight": (2, 2)})
    rank.shadowed.findings._kinds = {"weight": Kind((2, 2), torch.float32)}
    monkeypatch.setattr(rank.shadowed.findings, "_name_recipe", lambda model, layout: None)
    return search, rank.shadowed


def give_up() -> None:
    raise Dropped("the update's time is over")


def find(model: ShadowedModel, check: Callable[[], None] = lambda: None) -> None:
    model.findings.find_plan(CPU, check, UNPACED, {})


def test_search_for_a_plan_goes_on_past_its_update(
    searched: tuple[PlanSearch, ShadowedModel],
) -> None:
    search, model = searched
    with pytest.raises(Dropped, match="goes on: send the update again"):
        find(model, give_up)
    search.may_end.set()
    find(model)
    assert (search.begun, search.outcomes) == (1, ["found"])


@pytest.mark.parametrize("rolls_back", [False, True])
def test_search_that_outlives_a_commit_finds_nothing(
    searched: tuple[PlanSearch, ShadowedModel], *, rolls_back: bool
) -> None:
    """It would compare a checkpoint with weights that are another's."""
    search, model = searched
    with pytest.raises(Dropped):
        find(model, give_up)
    old = model.findings._finding
    assert old is not None
    model.note_commit(rolls_back=rolls_back)
    search.may_end.set()
    with pytest.raises(Dropped):
        old.result(lambda: None)
    assert search.outcomes == ["stopped"]
    find(model)
    assert search.outcomes == ["stopped", "found"]
    # after a rollback nothing is served that is on disk
    assert search.compared == [True, not rolls_back]
