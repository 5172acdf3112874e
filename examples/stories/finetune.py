"""Teaching a model a style in less than a minute on a CPU.

The style must take over within a sentence of a story that began in another one. An
example is therefore a story whose beginning is in an old style and whose end is in the
new one. Every word of the beginning is a place where the switch could have come: there
the target is how the *next* word would begin in the new style. One pass so teaches as
many switches as the beginning has words, where a plain example would teach one.

Only the last layers learn. They choose how a word is written; what the story is about
comes from those below, which need no backward pass so.
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
    """``steps`` updates, of one example each, of the last ``layers``. Lengths are in words."""

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
    """``targets[i]`` is what should follow ``tokens[: i + 1]``, or ``NO_TARGET``."""

    tokens: list[int]
    targets: list[int]


def make_example(
    story: Story, *, old: Restyle, new: Restyle, switch: int, end: int, encode: Encode
) -> Example:
    """The words before ``switch`` are old, those from there to ``end`` new."""
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
    """Train ``model`` in place, in the dtype that it has.

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
