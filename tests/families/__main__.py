"""``python -m tests.families``: run the rows, and write each into ``docs/families.md`` at once.

A row is a class of SGLang's ``ModelRegistry``. A row whose logits or tensors differ after an update
is a failure: the command exits with 1, and the document names it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import typer

from tests.families import row, table
from tests.families.families import why_not_built
from tests.families.result import WRONG


def main(only: list[str] | None = None, *, write: bool = True, servers: bool = True) -> None:
    """Run the rows of all classes, or of those with one of these words in their name.

    Without ``servers`` only tensors are compared, and rows of a run with servers are kept.
    """
    wrong = []
    for name in table.classes():
        if why_not_built(name) or not (only is None or any(word in name for word in only)):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = row.run(name, Path(folder), servers=servers)
        seconds = round(time.monotonic() - began)
        print(json.dumps({"class": name, **asdict(result), "seconds": seconds}), flush=True)
        if write:
            table.write({name: result}, over_servers=servers)
        if result.kind == WRONG:
            wrong.append(name)
    if wrong:
        sys.exit(f"updates are wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    typer.run(main)
