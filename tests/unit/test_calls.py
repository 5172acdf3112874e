"""Every row of the table of calls has a handler that fits it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from sglang_inflight.client.fields import BeginFields, UpdateFields
from sglang_inflight.frontend.handlers import Handler, direct_handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.vocabulary import bodies
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.calls import TABLE, Call
from tests.unit.fakes import SETTINGS


def handlers() -> dict[str, tuple[Handler, Handler]]:
    """Each call's handler, and the one of transparent mode."""
    # not at the top: without an extension's folder the other tests run
    from sglang_inflight.extensions.adapters.adapters import add_handlers
    from sglang_inflight.extensions.contracts import version_waits
    from sglang_inflight.extensions.control_planes import entry
    from sglang_inflight.extensions.drain import drain
    from sglang_inflight.extensions.fleet import fleet_version as fleet
    from sglang_inflight.extensions.memory import front_end as memory
    from sglang_inflight.extensions.saves import front_end as saves
    from sglang_inflight.extensions.saves import offers
    from sglang_inflight.extensions.shards import front_end as shards
    from sglang_inflight.extensions.transparent.windows import Transparent

    classes: dict[str, Any] = {
        "pauses": Pauses,
        "updates": Updates,
        "groups": Groups,
    }
    by_class: Any = {name: each.__new__(each) for name, each in classes.items()}
    nothing: Any = SimpleNamespace()
    direct = direct_handlers(nothing, **by_class, ask_status=nothing)
    front_end: Any = SimpleNamespace(
        ranks=None,
        settings=SETTINGS,
        part=lambda kind: kind.__new__(kind),
        updates=by_class["updates"],
    )
    for add in (
        saves.add_handlers,
        offers.add_handlers,
        shards.add_handlers,
        memory.add_handlers,
        add_handlers,
        drain.add_handler,
        fleet.add_handler,
        version_waits.add_handler,
        entry.add_handler,
    ):
        direct = add(front_end, nothing, direct)
    transparent = Transparent.__new__(Transparent)
    transparent._direct = direct
    replaced = transparent.handlers.by_name
    assert direct.by_name.keys() == replaced.keys()
    return {name: (direct[name], replaced[name]) for name in replaced}


def test_every_call_has_a_handler() -> None:
    assert handlers().keys() == TABLE.keys()


@pytest.mark.parametrize("call", TABLE.values(), ids=TABLE)
def test_handler_fits_its_row(call: Call) -> None:
    for handler in handlers()[call.name]:
        hints = get_type_hints(handler)
        body = hints[next(iter(inspect.signature(handler).parameters))]
        assert issubclass(call.body, body)
        returned = hints["return"]
        ours = [
            each
            for each in (get_args(returned) or (returned,))
            if inspect.isclass(each) and issubclass(each, Answer)
        ]
        assert set(ours) <= set(call.answers)


UPDATES = (
    bodies.DiskBody,
    bodies.TensorBody,
    bodies.DistributedBody,
    bodies.IPCBody,
    bodies.PeerBody,
)


@pytest.mark.parametrize(
    ("fields", "shapes", "set_by_client"),
    [
        (UpdateFields, UPDATES, {"session_id"}),
        (
            BeginFields,
            (bodies.BeginBody,),
            {"session_id", "new_id", "lease_s", "non_blocking", "partial"},
        ),
    ],
)
def test_clients_fields_are_those_of_the_bodies(
    fields: Any, shapes: tuple[type[bodies.Body], ...], set_by_client: set[str]
) -> None:
    known = {name for shape in shapes for name in shape.__struct_fields__}
    assert get_type_hints(fields).keys() == known - set_by_client
