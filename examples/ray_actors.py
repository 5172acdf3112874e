"""Generate by ``sglang.Engine`` in a Ray actor, while another actor changes its weights.

python -m examples.ray_actors --model-path /ckpt/step-0 --new /ckpt/step-1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import ray

from sglang_inflight.client import read_spans

SAMPLING = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


class Rollouts:
    def __init__(self, model_path: str) -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=model_path, weight_version="old", max_total_tokens=16384
        )

    def generate(self, text: str) -> Iterator[dict[str, Any]]:
        yield from self._engine.generate(text, SAMPLING, stream=True)

    def update(self, checkpoint: str, version: str) -> dict[str, Any]:
        receipt: dict[str, Any] = self._engine.update_weights_from_disk(
            checkpoint, weight_version=version, non_blocking=True, flush_cache=False
        )
        return receipt

    def shutdown(self) -> None:
        self._engine.shutdown()


class Trainer:
    def publish(self, rollouts: Any, checkpoint: str, version: str) -> dict[str, Any]:
        receipt: dict[str, Any] = ray.get(rollouts.update.remote(checkpoint, version))
        return receipt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.ray_actors")
    parser.add_argument("--model-path", required=True, help="the checkpoint to begin with")
    parser.add_argument("--new", required=True, help="the one to change to")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of the engine; 0 is a CPU")
    options = parser.parse_args()

    # an address in RAY_ADDRESS joins that cluster
    ray.init(include_dashboard=False)
    # two threads, so that a call to update does not wait for a call to generate
    actor = ray.remote(num_gpus=options.gpus, max_concurrency=2)(Rollouts)
    rollouts = actor.remote(options.model_path)
    chunks = rollouts.generate.options(num_returns="streaming").remote("Once upon a time")
    ray.get(next(chunks))  # the first token is there

    trainer = ray.remote(Trainer).remote()
    receipt = ray.get(trainer.publish.remote(rollouts, options.new, "new"))
    print(f"{receipt['base_version']} -> {receipt['weight_version']}")
    *_, last = chunks
    for span in read_spans(ray.get(last)["meta_info"]):
        print(f"tokens {span.start} to {span.end} by {span.version}")
    ray.get(rollouts.shutdown.remote())
    ray.shutdown()


if __name__ == "__main__":
    main()
