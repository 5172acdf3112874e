"""Memory freed in a capture stays the graph's own."""

from __future__ import annotations

from typing import Any

import torch

from tests.glass.card import on_card

glass: Any = torch.get_device_module("glass")


@on_card()
def test_memory_freed_in_a_capture_is_not_given_back() -> None:
    ones = torch.ones(1 << 20, device="glass")
    pool, graph = glass.graph_pool_handle(), glass.Graph()
    with glass.graph(graph, pool=pool):
        made = ones + 1
        del made
    glass.empty_cache()
    assert glass.segments_of(pool)
    graph.reset()
    glass.empty_cache()
    assert not glass.segments_of(pool)
