"""A trainer in smg's environment that pauses and then hangs: ``hold_pause.py URL SELECTOR``.

It writes a line once its pause is held.
"""

from __future__ import annotations

import signal
import sys

from smg.rl import RL, paused


def main(url: str, selector: str) -> None:
    with paused(RL(url), selector, mode="in_place"):
        print("paused", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
