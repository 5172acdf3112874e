"""Reads records of tokens from answers, and from servers that have one version only."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.server import Server, serve
from tests.support import routed
from tests.support.client_answers import GENERATE, Asked
from tests.support.load import ask, labels_of, until

# nats, and hidden states, between two float32 computations
CLOSE = 2e-3

TOP, LISTED = 2, [5, 6]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 8, "top_p": 0.7, "ignore_eos": True}
EVERYTHING: dict[str, Any] = {
    "return_logprob": True,
    "top_logprobs_num": TOP,
    "return_routed_experts": True,
    "return_sampling_mask": True,
    "return_hidden_states": True,
}
SERVING = (
    "--dtype", "float32",
    "--enable-return-routed-experts",
    "--enable-return-hidden-states",
)  # fmt: skip

# lists with an entry for each token of an answer
LISTS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)

Routes = npt.NDArray[np.int32]


_serial = itertools.count()


@dataclass
class Token:
    """Everything that an answer records of one token."""

    mask: set[int]
    logprob: float
    top: dict[int, float]
    listed: dict[int, float]
    # shape (layers, experts per token): the routes of the forward that sampled the token
    routes: Routes
    hidden: list[float]


def routes_of(meta: dict[str, Any]) -> Routes:
    """Return rows of shape (layers, experts per token), one for each position but the last."""
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    return flat.reshape(-1, routed.LAYERS, routed.PER_TOKEN)


def tokens_of(content: dict[str, Any], prompt_tokens: int) -> list[Token]:
    """Return the records of a whole answer, and check that all lists have one entry a token."""
    meta, count = content["meta_info"], len(content["output_ids"])
    routes = routes_of(meta)
    assert len(routes) == prompt_tokens + count - 1
    assert len(meta["hidden_states"]) == count
    expect_lengths(meta, count)
    # the first token comes with the states of the whole prompt
    (*_, first), *others = meta["hidden_states"]
    hidden = [first, *others]
    return [
        Token(
            set(meta["output_token_sampling_mask"][index]),
            meta["output_token_logprobs"][index][0],
            {token: logprob for logprob, token, _ in meta["output_top_logprobs"][index]},
            {token: logprob for logprob, token, _ in meta["output_token_ids_logprobs"][index]},
            routes[prompt_tokens - 1 + index],
            hidden[index],
        )
        for index in range(count)
    ]


def expect_lengths(meta: dict[str, Any], count: int) -> None:
    """Check that each list per token has ``count`` entries."""
    for name in LISTS:
        assert len(meta[name]) == count, name


class Chunks(Asked):
    """A request with every record, which keeps each chunk as it came."""

    def __init__(
        self, server: Server, input_ids: list[int], tokens: int, *, increments: bool, **fields: Any
    ) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.prompt = input_ids
        self.rid = f"records-{next(_serial)}"
        sampling = SAMPLING | {"max_new_tokens": tokens} | fields.pop("sampling_params", {})
        body = {
            "rid": self.rid,
            "input_ids": input_ids,
            "sampling_params": sampling,
            "stream": True,
            "token_ids_logprob": LISTED,
            **EVERYTHING,
            **fields,
        }
        super().__init__(server, GENERATE, body, increments=increments)

    def _take_generated(self, content: dict[str, Any], *, adds: bool) -> None:
        self.chunks.append(content)
        super()._take_generated(content, adds=adds)

    def wait_for_version(self, version: str) -> None:
        """Wait for a token by ``version``. Older ones may still be on their way to this process."""

        def has_come() -> bool:
            labels = labels_of(self.chunks[-1]["meta_info"]["weight_versions"])
            return bool(labels) and labels[-1] == version

        until(f"a token by {version}", has_come)

    def abort(self) -> None:
        ask(self._server, "POST", "/abort_request", {"rid": self.rid})

    def whole(self) -> dict[str, Any]:
        """Return the answer as without a stream, and check the lengths in every chunk."""
        self.answer()
        last = self.chunks[-1]
        for chunk in self.chunks:
            meta = chunk["meta_info"]
            expect_lengths(meta, len(chunk["output_ids"]))
            assert len(meta["hidden_states"]) == meta["completion_tokens"]
        if not self._increments or not self._body["stream"]:
            return last
        meta = dict(last["meta_info"])
        for name in LISTS:
            meta[name] = [each for chunk in self.chunks for each in chunk["meta_info"][name]]
        tokens = [token for chunk in self.chunks for token in chunk["output_ids"]]
        return {"output_ids": tokens, "meta_info": meta}


@contextlib.contextmanager
def single_version(version: Path, log: Path) -> Iterator[Server]:
    """Start a server of ``version`` alone. It reuses no prefix."""
    with serve(version, *SERVING, "--disable-radix-cache", log=log) as server:
        yield server


def expect_same(found: Token, expected: Token, name: str) -> None:
    assert found.routes.tolist() == expected.routes.tolist(), name
    assert found.mask == expected.mask, name
    assert abs(found.logprob - expected.logprob) < CLOSE, name
    for mine, theirs in (found.top, expected.top), (found.listed, expected.listed):
        for token, logprob in mine.items():
            assert abs(logprob - theirs[token]) < CLOSE, (name, token)
    assert np.allclose(found.hidden, expected.hidden, atol=CLOSE), name


def ask_for(
    server: Server, prompt: list[int], tokens: list[int], wanted: Sequence[int]
) -> list[Token]:
    """Return what ``server`` records of the ``wanted`` ones of ``tokens``.

    Each token is asked for alone, after the prompt and the tokens before it.
    """
    body = {
        "input_ids": [prompt + tokens[:index] for index in wanted],
        "sampling_params": SAMPLING | {"max_new_tokens": 1},
        "token_ids_logprob": [[*LISTED, tokens[index]] for index in wanted],
        **EVERYTHING,
    }
    found = []
    for index, content in zip(wanted, ask(server, "POST", "/generate", body), strict=True):
        (token,) = tokens_of(content, len(prompt) + index)
        # log-probability of the token sampled before, not of the one sampled now
        token.logprob = token.listed[tokens[index]]
        found.append(token)
    return found


def ask_for_routes(server: Server, tokens: list[int]) -> list[Any]:
    """Return the routes of ``tokens``, all computed by one prefill."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1},
        "return_routed_experts": True,
    }
    rows: list[Any] = routes_of(ask(server, "POST", "/generate", body)["meta_info"]).tolist()
    return rows
