"""A door's description of a request, and the order in which the checks refuse it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_inflight.extensions.contracts import checks
from sglang_inflight.extensions.contracts.version_waits import VersionWaits
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.rank_versions import RankVersions
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import AT_THE_DOOR, admit
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.errors import NotFound, Refused, Rejected
from sglang_inflight.vocabulary.labels import VersionLabel

ADAPTERS = {"policy": "policy", None: None}


@pytest.fixture(autouse=True)
def with_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the checks of contracts among the core's."""
    monkeypatch.setattr(AT_THE_DOOR, "_functions", ())
    AT_THE_DOOR.compose([checks.__name__, VersionWaits.__module__])


class FrontEnd(SimpleNamespace):
    """A front end that serves version 1, and rejects requests in a pause."""

    def __init__(self, *, rejects: bool) -> None:
        versions = RankVersions([Rank(0, 0, 0)], "1")
        manager: Any = SimpleNamespace()
        waits = VersionWaits(versions, lambda _: None, Lifetime(manager), timeout_s=60)
        super().__init__(
            versions=versions,
            pauses=SimpleNamespace(rejects=rejects),
            why_behind=None,
            model_names=SimpleNamespace(adapter_of=self._adapter_of),
            part=lambda _: waits,
        )

    def _adapter_of(self, model: str | None) -> str | None:
        if model not in ADAPTERS:
            raise NotFound("no such model")
        return ADAPTERS[model]


def ask(sampling: Any = None, *, model: str | None = None, **body: Any) -> tuple[Any, Asked]:
    obj = GenerateReqInput(text=["a", "b"], sampling_params=sampling)
    return obj, Asked.of(obj, body, model)


def run(frontend: Any, asked: Asked) -> None:
    asyncio.run(admit(frontend, asked))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (ask(model="gone", min_weight_version="x"), NotFound),
        (ask(model="policy", min_weight_version="x"), Refused),
        (ask([{"custom_params": {"min_weight_version": -1}}, {}]), Refused),
        (ask(min_adapter_version=1), Refused),
        (ask(min_weight_version=2), Rejected),
        (ask(), Rejected),
    ],
    ids=["model", "contract", "contract of a prompt", "no adapter", "version", "pause"],
)
def test_wrong_request_is_refused_before_one_at_a_wrong_time(
    asked: tuple[Any, Asked], error: type[Exception]
) -> None:
    with pytest.raises(Refused) as refused:
        run(FrontEnd(rejects=True), asked[1])
    assert type(refused.value) is error


def test_pause_that_begins_during_a_wait_rejects_the_request() -> None:
    async def wait() -> None:
        frontend: Any = FrontEnd(rejects=False)
        admitting = asyncio.ensure_future(admit(frontend, ask(min_weight_version=2)[1]))
        while not frontend.versions._sleeping:
            await asyncio.sleep(0)
        frontend.pauses.rejects = True
        frontend.versions.replace([VersionLabel(1, "2")])
        with pytest.raises(Rejected):
            await admitting

    asyncio.run(wait())


@pytest.mark.parametrize("sampling", [None, {"n": 2}, [None, {"custom_params": {"mine": 1}}]])
def test_door_hands_on_what_the_checks_have_set(sampling: Any) -> None:
    obj, asked = ask(sampling, model="policy", min_weight_version=1)
    run(FrontEnd(rejects=False), asked)
    asked.put_into(obj)
    assert obj.lora_path == "policy"
    contract = {"min_weight_version": 1}
    assert obj.sampling_params == (
        [{"custom_params": contract}, {"custom_params": {"mine": 1, **contract}}]
        if isinstance(sampling, list)
        else {**(sampling or {}), "custom_params": contract}
    )


@pytest.mark.parametrize("sampling", [None, {"n": 2}, [{"n": 1}, {"custom_params": {"mine": 1}}]])
def test_request_without_demands_is_handed_on_as_it_is(sampling: Any) -> None:
    obj, asked = ask(sampling)
    run(FrontEnd(rejects=False), asked)
    asked.put_into(obj)
    assert (obj.lora_path, obj.sampling_params) == (None, sampling)
