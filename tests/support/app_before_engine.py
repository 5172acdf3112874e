"""SGLang's HTTP app, imported before the ``Engine`` it serves: see ``engine_calls.serve``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sglang
from sglang.srt.entrypoints import http_server

from tests.support.engine_calls import serve


def main() -> None:
    checkpoints, answers = Path(sys.argv[1]), Path(sys.argv[2])
    assert http_server.app.router.routes
    engine = sglang.Engine(model_path=str(checkpoints / "v0"), max_total_tokens=16384)
    try:
        answers.write_text(json.dumps(serve(engine)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
