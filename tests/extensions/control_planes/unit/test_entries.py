"""An entry's fields from the status of several ranks, and from what a server cannot do."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from sglang_inflight.extensions.control_planes.entry import (
    abilities_of,
    routes_of,
    span_of_epochs,
    why_no_update,
)
from sglang_inflight.vocabulary.answers import (
    Capabilities,
    PauseMode,
    RankStatus,
    StagingStatus,
    Status,
    WorkerAbilities,
)
from sglang_inflight.vocabulary.calls import TABLE

WHY = "this server cannot do it"


def status_of(*ranks: dict[str, Any], staging: str = "device", **fields: Any) -> Status:
    """Return the status of a server with these ``ranks``, each with an epoch and a refusal."""

    def state(epoch: int = 0, refusal: str | None = None) -> dict[str, Any]:
        return {
            "state": "running", "paused": False, "mode": None, "holders": (), "running": 0,
            "waiting": 0, "weight_version": "v0", "epoch": epoch, "digest": None,
            "previous_version": None,
            "staging": StagingStatus(
                mode=staging, state="empty", update_id=None, tensors=0, bytes=0,
                can_roll_back=False, dirty=None, refusal=refusal, groups={},
            ),
        }  # fmt: skip

    states = [state(**rank) for rank in ranks or ({},)]
    return Status(
        **states[0],
        **{"capabilities": Capabilities(), **fields},
        ranks=tuple(
            RankStatus(**each, dp_rank=0, tp_rank=tp, pp_rank=0) for tp, each in enumerate(states)
        ),
    )


def abilities(status: Status) -> WorkerAbilities:
    return abilities_of(status, [*TABLE], sleeps=True)


def test_server_without_refusals_offers_everything_but_transparent_pauses() -> None:
    found = abilities(status_of())
    assert set(found.pause_modes) == set(get_args(PauseMode))
    assert {"disk", "tensor", "distributed", "ipc"} < set(found.update_from)
    assert [name for name, can in found.as_json().items() if can is False] == ["transparent"]
    assert abilities(status_of(extensions=("transparent",))).transparent


@pytest.mark.parametrize("row", ["retract", "kv_max_age", "pin"])
def test_refused_row_takes_one_ability(row: str) -> None:
    whole = abilities(status_of())
    found = abilities(status_of(capabilities=Capabilities(**{row: WHY})))
    if row == "retract":
        modes = tuple(mode for mode in whole.pause_modes if mode != "retract")
        assert found == msgspec.structs.replace(whole, pause_modes=modes)
    else:
        assert found == msgspec.structs.replace(whole, **{row: False})


def test_server_with_sglangs_pause_alone_only_aborts() -> None:
    refused = Capabilities(pause=WHY, retract=WHY)
    assert abilities(status_of(capabilities=refused)).pause_modes == ("abort",)


def test_update_refused_by_any_rank_is_refused() -> None:
    status = status_of({}, {"refusal": WHY})
    assert why_no_update(status) == WHY
    found = abilities(status)
    assert (found.update_from, found.sessions, found.two_phase) == ((), False, False)


def test_server_that_writes_in_place_has_sessions_in_one_phase() -> None:
    found = abilities(status_of(staging="off"))
    assert (found.sessions, found.two_phase) == (True, False)
    assert "disk" in found.update_from


def test_source_of_an_absent_extension_is_left_out() -> None:
    calls = [name for name in TABLE if name != "update_weights_from_peer"]
    found = abilities_of(status_of(), calls, sleeps=False)
    assert "peer" not in found.update_from
    assert "disk" in found.update_from
    assert not found.sleep_wake


def test_epochs_are_the_lowest_and_the_highest_of_the_ranks() -> None:
    assert span_of_epochs(status_of({"epoch": 8}, {"epoch": 7}, {"epoch": 8})) == (7, 8)


def test_routes_are_paths_without_a_first_slash() -> None:
    calls = ["inflight_status", "pause_generation", "flush_cache"]
    assert routes_of(calls) == ("flush_cache", "inflight/status", "pause_generation")
