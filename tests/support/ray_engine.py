"""A ``RayEngine`` whose weights change while it generates, in a process of its own.

``python -m tests.support.ray_engine CHECKPOINTS ANSWERS`` writes the results as JSON. This is a
script because an engine's shutdown kills every child of its process, Ray's nodes included.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from sglang.srt.ray.engine import RayEngine

TOKENS = 300
SAMPLING = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


def play(engine: Any, checkpoints: Path) -> dict[str, Any]:
    """Update the engine while another thread generates."""
    begun, chunks = threading.Event(), []

    def generate() -> None:
        for chunk in engine.generate(input_ids=[5, 6, 7], sampling_params=SAMPLING, stream=True):
            chunks.append(chunk)
            begun.set()

    generating = threading.Thread(target=generate)
    generating.start()
    begun.wait()
    receipt = engine.update_weights_from_disk(
        str(checkpoints / "v1"), weight_version="v1", non_blocking=True, flush_cache=False
    )
    generating.join()
    return {
        "ranks": len(receipt["ranks"]),
        # each chunk has all tokens so far
        "tokens": chunks[-1]["output_ids"],
        "spans": chunks[-1]["meta_info"]["weight_versions"],
    }


def main() -> None:
    checkpoints, answers = Path(sys.argv[1]), Path(sys.argv[2])
    # a user's group: a bundle for each rank, on both nodes of the cluster
    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * 2, strategy="SPREAD")
    ray.get(group.ready())
    engine = RayEngine(
        model_path=str(checkpoints / "v0"),
        weight_version="v0",
        max_total_tokens=16384,
        max_running_requests=8,
        dtype="bfloat16",
        tp_size=2,
        placement_group=group,
    )
    try:
        answers.write_text(json.dumps(play(engine, checkpoints)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
