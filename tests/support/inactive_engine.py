"""An ``sglang.Engine`` with unsupported settings, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang

SAMPLING = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


def make(checkpoints: Path) -> Any:
    return sglang.Engine(
        model_path=str(checkpoints / "v0"),
        tokenizer_worker_num=2,
        max_total_tokens=16384,
        max_running_requests=8,
        log_level="info",
    )


def said(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]


def generate(engine: Any) -> Any:
    return engine.generate(input_ids=[9, 6, 7], sampling_params=SAMPLING)["output_ids"]


def main() -> None:
    checkpoints, file = Path(sys.argv[1]), Path(sys.argv[2])
    answers: dict[str, Any] = {}
    try:
        make(checkpoints)
    except SystemExit as refusal:
        answers["refused"] = refusal.code
    os.environ["SGLANG_INFLIGHT_UNSUPPORTED"] = "off"
    engine = make(checkpoints)
    try:
        v1 = str(checkpoints / "v1")
        answers["tokens"] = [generate(engine)]
        answers["status"] = engine.inflight_status()
        answers["in flight"] = said(lambda: engine.update_weights_from_disk(v1, non_blocking=True))
        answers["pause"] = said(lambda: engine.pause_generation("in_place"))
        answers["async rollback"] = said(
            lambda: engine.loop.run_until_complete(engine.async_rollback_weights())
        )
        # a field of ours at its default
        answers["update"] = engine.update_weights_from_disk(v1, non_blocking=False)
        answers["tokens"].append(generate(engine))
        file.write_text(json.dumps(answers))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
