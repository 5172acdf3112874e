"""Runs a test on a card of its own: in a forked process, with settings of its own.

This process loads the device and never uses it, so each child sets it up anew.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

LIMIT_S = 120


class Ended(NamedTuple):
    """A child's end. ``value``: pickled result, None after a signal."""

    value: Any
    error: str
    signal: int
    stderr: str


def in_child(call: Callable[[], Any], folder: Path, **settings: object) -> Ended:
    """Run ``call`` in a forked process with ``GLASS_*`` settings, and return its end."""
    assert not torch.glass.is_initialized(), "this process has used the card"  # type: ignore[attr-defined]
    said = folder / "stderr"
    result, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            # a program that waits for itself ends
            signal.alarm(LIMIT_S)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            os.environ.update(
                {f"GLASS_{key.upper()}": str(value) for key, value in settings.items()}
            )
            torch.set_num_threads(1)
            try:
                answer = pickle.dumps((call(), ""))
            except BaseException:
                answer = pickle.dumps((None, traceback.format_exc()))
            with os.fdopen(write, "wb") as out:
                out.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(result, "rb") as into:
        answer = into.read()
    _, status = os.waitpid(child, 0)
    value, error = pickle.loads(answer) if answer else (None, "")
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not answer and not number:
        error = "the process ended without an answer"
    return Ended(value, error, number, said.read_text() if said.exists() else "")


def on_card(**settings: object) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated test on a card of its own, with these settings."""

    def wrap(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, tmp_path: Path, **kwargs: Any) -> None:
            ended = in_child(lambda: test(*args, **kwargs), tmp_path, **settings)
            if ended.signal:
                name = signal.Signals(ended.signal).name
                pytest.fail(f"{name}: {ended.stderr}", pytrace=False)
            if ended.error:
                pytest.fail(ended.error, pytrace=False)

        # pytest reads the fixtures' names from the signature
        own = inspect.signature(test)
        extra = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), extra])  # type: ignore[attr-defined]
        return run

    return wrap
