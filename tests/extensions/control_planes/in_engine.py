"""An ``sglang.Engine`` that writes its entry: ``python -m … MODEL FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sglang


def main() -> None:
    model, file = sys.argv[1:]
    engine = sglang.Engine(
        model_path=model,
        served_model_name="the-model",
        max_total_tokens=16384,
        max_running_requests=8,
    )
    try:
        waited = engine.inflight_worker()
        awaited = engine.loop.run_until_complete(engine.async_inflight_worker())
        engine.pause_generation("in_place")
        paused = engine.inflight_worker()
        Path(file).write_text(json.dumps([waited, awaited, paused]))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
