"""Build the checkpoints in a separate process, while the server starts.

``python -m examples.stories.build``. The process prints one JSON object a line on stdout:
``{"name": …, "done": …, "of": …}``. A checkpoint is complete when ``done`` equals ``of``.
After ``{"error": …}`` the process ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.ending import exit_at_sigterm
from examples.stories.finetune import OnStep
from examples.stories.smollm2 import BASE, build_base, build_styled
from examples.stories.styles import HEADLINE, VERSE

# training yields the cores to the server and its stories
NICENESS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.stories.build")
    parser.add_argument("--cache", type=Path, required=True, help="where checkpoints go")
    cache: Path = parser.parse_args(arguments).cache
    exit_at_sigterm()
    # stdout is for answers: all other output goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        print(json.dumps(event), file=answers, flush=True)

    try:
        build_base(cache)
        say(name=BASE, done=1, of=1)
        os.nice(NICENESS)
        for style in (HEADLINE, VERSE):
            build_styled(style, cache, _tell(say, style.name))
            say(name=style.name, done=1, of=1)
    except OSError as error:
        say(error=str(error))
        return 1
    return 0


def _tell(say: Callable[..., None], name: str) -> OnStep:
    """Report a step. After the last step the checkpoint must still be written."""
    return lambda done, of: say(name=name, done=done, of=of + 1)


if __name__ == "__main__":
    sys.exit(main())
