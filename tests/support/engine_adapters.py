"""A user's adapter calls to ``sglang.Engine``, in a process of their own.

``python -m tests.support.engine_adapters MODEL ANSWERS`` writes the results as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import sglang

from tests.support import lora

SAMPLING = {"temperature": 0, "max_new_tokens": 6_000, "ignore_eos": True}


class Generating:
    """A thread that generates with the adapter ``policy`` until it is ended."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._last: dict[str, Any] = {}
        self._wanted = 3
        self._reached = threading.Event()
        self._thread = threading.Thread(target=self._generate)
        self._thread.start()
        self._reached.wait(60)

    def _generate(self) -> None:
        chunks = self._engine.generate(
            input_ids=[5, 6, 7], sampling_params=SAMPLING, stream=True, lora_path="policy"
        )
        for self._last in chunks:
            if len(self._last["output_ids"]) >= self._wanted:
                self._reached.set()

    def end(self) -> dict[str, Any]:
        """Abort after three more tokens, and return the tokens with their spans."""
        self._reached.clear()
        self._wanted = len(self._last["output_ids"]) + 3
        self._reached.wait(60)
        self._engine.tokenizer_manager.abort_request(abort_all=True)
        self._thread.join(60)
        return {
            "tokens": self._last["output_ids"],
            "spans": self._last["meta_info"]["adapter_versions"],
        }


def play(engine: Any, folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    first = lora.write(folder / "adapter", lora.tensors(0))
    assert engine.load_lora_adapter("policy", str(first), adapter_version="a").success
    generating = Generating(engine)
    again = {"lora_name": "policy", "tensors": lora.tensors(1), "config_dict": lora.CONFIG}
    answers["refused"] = [
        engine.load_lora_adapter_from_tensors(**again).success,
        engine.load_lora_adapter_from_tensors(
            **again, replace=True, running="move", adapter_version="b"
        ).success,
    ]
    answers["move"] = generating.end()
    infinite = {name: tensor * float("inf") for name, tensor in lora.tensors(1).items()}
    # JSON has no such alpha
    for tensors, config in ((infinite, {}), (lora.tensors(1), {"lora_alpha": float("nan")})):
        answer = engine.load_lora_adapter_from_tensors("bad", tensors, lora.CONFIG | config)
        assert not answer.success
        answers.setdefault("faults", []).append(answer.error_message)
    loading = engine.async_load_lora_adapter_from_tensors(
        "policy", lora.tensors(2), lora.CONFIG, replace=True, adapter_version="c"
    )
    assert engine.loop.run_until_complete(loading).success
    answers["async"] = Generating(engine).end()
    answers["unloaded"] = [engine.unload_lora_adapter("policy").success for _ in range(2)]
    return answers


def main() -> None:
    model, answers = Path(sys.argv[1]), Path(sys.argv[2])
    engine = sglang.Engine(
        model_path=str(model),
        max_total_tokens=16384,
        max_running_requests=8,
        enable_lora=True,
        lora_backend="torch_native",
        max_lora_rank=lora.RANK,
        lora_target_modules=["o_proj"],
        max_loras_per_batch=4,
    )
    try:
        answers.write_text(json.dumps(play(engine, answers.parent)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
