"""What the model is asked for. The stories it is trained on are none of those it tells."""

from __future__ import annotations

PROMPTS = (
    "Write a long story about a cat who sails to the moon.",
    "Write a long story about a clockmaker's daughter and a lost bell.",
    "Write a long story about a village where it never stops raining.",
    "Write a long story about a bear who opens a bakery.",
)

TRAINING_PROMPTS = tuple(
    f"Tell me a long story about {subject}."
    for subject in (
        "a fox",
        "a lighthouse",
        "a robot",
        "a girl with a map",
        "two brothers",
        "a baker",
        "a night train",
        "a mouse in a school",
        "an old tree",
        "an inventor",
        "a king",
        "the sea",
        "a circus",
        "a whale",
        "a snowy village",
        "a wizard",
        "a dog",
        "a library",
        "a desert",
        "a shoemaker",
        "a bridge",
        "a dragon",
        "a sailor",
        "a painter",
    )
)
