"""Our walk through a model's modules gives what PyTorch's does."""

from __future__ import annotations

from torch import nn

from sglang_inflight.scheduler.update.attributes import modules_of


def test_walk_differs_from_pytorchs_with_shared_and_missing_modules() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(
        nn.Sequential(nn.ReLU(), shared), shared, nn.ModuleList([nn.Sequential(shared), nn.Tanh()])
    )
    model.register_module("none", None)
    model[0].circle = nn.ModuleList([model[1]])
    assert list(modules_of(model)) == list(model.named_modules())
