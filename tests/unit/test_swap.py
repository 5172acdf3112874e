"""Swaps of contents, like on a device, in a CPU's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.swap import ContentSwap, Pairs, PreparedSwap, swap_for
from sglang_inflight.vocabulary.errors import Unproven
from tests.support.calls import calls_of

CPU = torch.device("cpu")
SPARE_BYTES = 64
# operations allowed to a commit: views and copies
ALLOWED = {"as_strided", "copy_", "detach", "slice", "view"}


class Operations(TorchDispatchMode):
    """Records the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WEIGHTS = {
    "smaller than the spare piece": torch.arange(5),
    "many pieces, the last one not whole": torch.arange(101),
    "bfloat16": torch.arange(77).to(torch.bfloat16),
    "one byte each": torch.arange(100, dtype=torch.uint8),
    "boolean": torch.tensor([True, False, True]),
    "a scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(60.0).view(6, 10).t(),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_content_swap_exchanges_values_in_place(weight: torch.Tensor) -> None:
    live, shadow = weight.clone(), torch.zeros_like(weight)
    pointers = live.data_ptr(), shadow.data_ptr()
    how = ContentSwap(CPU, SPARE_BYTES)
    how.check("weight", live)
    with Operations() as done:
        how.swap(live, shadow)
    assert torch.equal(shadow, weight)
    assert torch.equal(live, torch.zeros_like(weight))
    assert (live.data_ptr(), shadow.data_ptr()) == pointers
    assert done.names <= ALLOWED
    how.swap(live, shadow)
    assert torch.equal(live, weight)


def test_content_swap_keeps_neighbouring_memory() -> None:
    memory = torch.arange(60.0)
    live, shadow = memory[20:40], torch.zeros(20)
    ContentSwap(CPU, SPARE_BYTES).swap(live, shadow)
    assert torch.equal(shadow, torch.arange(20.0, 40.0))
    memory[20:40] += torch.arange(20.0, 40.0)
    assert torch.equal(memory, torch.arange(60.0))


def test_weight_with_holes_is_refused() -> None:
    live = torch.arange(40.0).view(4, 10)[:, :5]
    how = ContentSwap(CPU, SPARE_BYTES)
    with pytest.raises(Unproven, match="'weight' cannot be staged: its memory has holes"):
        how.check("weight", live)


def test_weight_kept_on_the_host_is_refused() -> None:
    live = torch.zeros(4)
    how = ContentSwap(torch.device("meta"), SPARE_BYTES)
    with pytest.raises(Unproven, match="'weight' cannot be staged: it is kept on the host"):
        how.check("weight", live)


def pairs_of(count: int) -> Pairs:
    return tuple(
        (torch.nn.Parameter(torch.full((2,), float(at)), requires_grad=False), torch.zeros(2))
        for at in range(count)
    )


def addresses(pairs: Pairs) -> list[tuple[int, int]]:
    return [(live.data_ptr(), shadow.data_ptr()) for live, shadow in pairs]


def test_pointers_are_exchanged_by_as_many_calls_for_any_number_of_weights() -> None:
    calls = []
    for count in 1, 300:
        pairs = pairs_of(count)
        before = addresses(pairs)
        swap = PreparedSwap(swap_for(CPU), pairs)
        calls.append(calls_of(swap.make))
        assert addresses(pairs) == [(shadow, live) for live, shadow in before]
        assert swap.make() == count * 8
        assert addresses(pairs) == before
    assert len(set(calls)) == 1


def test_weight_that_something_views_at_times_changes_with_the_others() -> None:
    """Contents are exchanged while there is a view, and pointers before and after."""
    pairs = pairs_of(5)
    swap = PreparedSwap(swap_for(CPU), pairs)
    swap.make()
    viewed, at_the_view = pairs[3][0], pairs[3][0].data_ptr()
    view = viewed.data.view(2)
    swap.make()
    assert [live.tolist() for live, _ in pairs] == [[at, at] for at in range(5)]
    assert viewed.data_ptr() == view.data_ptr() == at_the_view
    del view
    for serves_first in False, True, False:
        swap.make()
        first = [pair[0 if serves_first else 1] for pair in pairs]
        assert [weight.tolist() for weight in first] == [[at, at] for at in range(5)]
    assert viewed.data_ptr() != at_the_view


def test_pointers_are_exchanged_once_an_older_swap_is_gone() -> None:
    """Each swap holds the memory it exchanges, which is no use by a model."""
    pairs = pairs_of(2)
    swap = PreparedSwap(swap_for(CPU), pairs)
    swap.make()
    swap = PreparedSwap(swap_for(CPU), pairs)
    before = addresses(pairs)
    swap.make()
    assert addresses(pairs) == [(shadow, live) for live, shadow in before]
