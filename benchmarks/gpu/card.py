"""The card that the kit runs on: a GPU, or the glass card of ``harness.glass``, which is none.

A device's module in torch has the names of ``torch.cuda``, so the kit's code is the same on both.
What is CUDA's alone asks for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

GLASS = "glass"
NO_GPU = "glass card (no GPU): numbers mean nothing"


class NotRun(Exception):
    """This part cannot run on this machine; the message is a sentence that says why."""


def has_card() -> bool:
    return device().type != "cpu"


def has_gpu() -> bool:
    return device().type == "cuda"


def is_glass() -> bool:
    return device().type == GLASS


def device() -> torch.device:
    """Return the card's device, or the CPU's where there is no card."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in ("cuda", GLASS) else torch.device("cpu")


def module() -> Any:
    """Return ``torch.cuda``, or the module that the glass card has in its place."""
    return torch.get_device_module(device())


def name() -> str | None:
    """Return the name of the card, which says of the glass card that it is no GPU."""
    if is_glass():
        return NO_GPU
    found: str | None = module().get_device_name() if has_card() else None
    return found


def prepare() -> None:
    """Let a launch of the glass card stand in for our Triton kernel, in this process."""
    if is_glass():
        from harness.glass.platform import exchange_by_card

        exchange_by_card()


def need_card() -> None:
    """Raise ``NotRun`` where torch sees no card."""
    if not has_card():
        raise NotRun("This machine has no CUDA device.")


def need_gpu(why: str) -> None:
    """Raise ``NotRun`` where torch sees no GPU; the sentence ``why`` is the glass card's."""
    need_card()
    if is_glass():
        raise NotRun(why)
