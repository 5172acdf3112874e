"""Asynchronous GRPO on one server, with five ways to update its weights: ``make rl``."""
