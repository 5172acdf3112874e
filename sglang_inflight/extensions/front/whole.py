"""A whole answer of OpenAI's or vLLM's routes.

The answer of a server that drains has the tokens so far, and the next server goes on behind them.
The tokens of a server that dies are lost, and the next one begins anew: the caller has none.
"""

from __future__ import annotations

from typing import Any

from sglang_inflight.client.answers import Json
from sglang_inflight.extensions.front.relay import Relay
from sglang_inflight.vocabulary.so_far import OUTPUT_SO_FAR


class Whole(Relay):
    """One whole answer, in the form of its route."""

    def take(self, chunk: Json, server: str) -> bool:
        choices: list[Any] = chunk.get("choices") or []
        for choice in choices:
            output = choice.pop(OUTPUT_SO_FAR, None)
            for span in choice.get("weight_versions") or ():
                span.setdefault("server", server)
            # several samples do not move
            if output and output.get("token_ids") and len(choices) == 1:
                self._take_output(output, server)
        reasons = {choice.get("finish_reason") for choice in choices}
        self.finish_reason = "abort" if "abort" in reasons else next(iter(reasons), "stop")
        self._new = chunk
        return True

    def why_not_movable(self) -> str | None:
        return None

    def restart(self) -> None:
        self._so_far = {}
