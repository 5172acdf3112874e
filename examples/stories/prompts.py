"""Prompts of the stories."""

from __future__ import annotations

PROMPTS = (
    "Write a long story about a cat who sails to the moon.",
    "Write a long story about a clockmaker's daughter and a lost bell.",
    "Write a long story about a village where it never stops raining.",
    "Write a long story about a bear who opens a bakery.",
)
