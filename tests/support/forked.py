"""Run code in a process with SGLang imported, for tests that need a process of their own.

A fresh interpreter would spend seconds on the import.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from harness.starting import Process, end, start


class Talk(NamedTuple):
    """A running process: what it says, and what it hears."""

    process: Process
    says: IO[str]
    hears: IO[str]


def run(
    arguments: Sequence[str],
    *,
    said: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    wait_s: float,
) -> str:
    """Run ``python`` with these arguments and this input, and return its output.

    Raises ``AssertionError`` with the process' errors if it fails.
    """
    with (
        tempfile.TemporaryFile("w+") as reads,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        reads.write(said)
        reads.seek(0)
        process = start(arguments, output=output, errors=errors, reads=reads, env=env, cwd=cwd)
        try:
            code = process.wait(wait_s)
        finally:
            end(process)
        errors.seek(0)
        assert code == 0, errors.read()[-2000:]
        output.seek(0)
        return output.read()


@contextlib.contextmanager
def talk(arguments: Sequence[str], cwd: Path | None = None) -> Iterator[Talk]:
    """Start ``python`` with these arguments, and end it with the block."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with (
        os.fdopen(ours_in) as says,
        os.fdopen(ours_out, "w") as hears,
        os.fdopen(theirs_out, "wb") as output,
        os.fdopen(theirs_in, "rb") as reads,
        tempfile.TemporaryFile() as errors,
    ):
        process = start(arguments, output=output, errors=errors, reads=reads, cwd=cwd)
        output.close()
        reads.close()
        try:
            yield Talk(process, says, hears)
        finally:
            end(process)
