"""Teach a model a style in less than a minute on a CPU.

The style must take over within a sentence of a story in another style. So an example begins in an
old style and ends in the new one. The switch could come at every word of the beginning. The target
there is the beginning of the *next* word in the new style. So one pass teaches a switch at each
word of the beginning. A plain example would teach one.

Only the last layers learn. They choose the spelling of a word. The layers below choose its meaning,
and need no backward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from examples.stories.corpus import Story
from examples.stories.styles import Restyle, Style, into_pieces

OnStep = Callable[[int, int], None]
Encode = Callable[[str], list[int]]

NO_TARGET = -100


@dataclass(frozen=True)
class Recipe:
    """Train the last ``layers`` for ``steps`` updates of one example each. Lengths are in words."""

    steps: int = 28
    layers: int = 8
    learning_rate: float = 8e-4
    warmup_steps: int = 4
    longest_beginning: int = 60
    longest_end: int = 45
    seed: int = 0

    def rate_at(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warmup * (1 - 0.9 * step / self.steps)


class Example(NamedTuple):
    """``targets[i]`` is the token to follow ``tokens[: i + 1]``, or ``NO_TARGET``."""

    tokens: list[int]
    targets: list[int]


def make_example(
    story: Story, *, old: Restyle, new: Restyle, switch: int, end: int, encode: Encode
) -> Example:
    """Make an example: old words before ``switch``, new words from there to ``end``."""
    pieces = into_pieces(story.text)
    before, after = old(pieces), new(pieces)
    tokens = encode(story.prompt)
    targets = [NO_TARGET] * len(tokens)
    for index in range(min(end, len(pieces))):
        wanted = encode(after[index])
        targets[-1] = wanted[0]
        if index < switch:
            followed = encode(before[index])
            targets += [NO_TARGET] * len(followed)
        else:
            followed = wanted
            targets += [*wanted[1:], NO_TARGET]
        tokens += followed
    return Example(tokens, targets)


def teach(
    model: Any,
    tokenizer: Any,
    stories: Sequence[Story],
    style: Style,
    *,
    old_styles: Sequence[Restyle],
    on_step: OnStep,
    recipe: Recipe | None = None,
) -> None:
    """Train ``model`` in place, in its own dtype.

    The optimizer works in float32, because steps this small round to nothing in bfloat16.
    """
    recipe = recipe or Recipe()
    rng = random.Random(recipe.seed)
    model.requires_grad_(False)
    learning = [*model.model.layers[-recipe.layers :], model.model.norm]
    parameters = [parameter for part in learning for parameter in part.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.0)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for step in range(recipe.steps):
        switch = rng.randint(0, recipe.longest_beginning)
        example = make_example(
            rng.choice(stories),
            old=rng.choice(old_styles),
            new=style.restyle,
            switch=switch,
            end=switch + recipe.longest_end,
            encode=encode,
        )
        torch.autograd.backward(_loss(model, example))
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        on_step(step + 1, recipe.steps)


def _loss(model: Any, example: Example) -> torch.Tensor:
    targets = torch.tensor(example.targets)
    (places,) = torch.nonzero(targets != NO_TARGET, as_tuple=True)
    hidden = model.model(torch.tensor([example.tokens])).last_hidden_state[0, places]
    return functional.cross_entropy(model.lm_head(hidden).float(), targets[places])
