"""A prefill server and a decode server on this machine, with KV sent over TCP."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.marker import FIRST
from harness.server import Server, free_port, serve
from tests.support.load import Generation, Output, labels_of, update

POOL = 4096  # tokens
CHUNK = 128
_ENV = {
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_HOST_IP": "127.0.0.1",
}
_rooms = itertools.count(1)


def why_no_pair() -> str | None:
    """Return why no pair can be started here, or None."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"a pair needs what `make test-pairs` installs, and Debian's libibverbs1: {error}"
    return None


@dataclass
class Pair:
    prefill: Server
    decode: Server
    bootstrap_port: int

    def generate(self, *, tokens: int, **fields: Any) -> PairedGeneration:
        """Send the same request to both servers, like a router."""
        return PairedGeneration(self, tokens, fields | self.meeting())

    def meeting(self) -> dict[str, Any]:
        """Return the fields by which the two servers find each other, for one request."""
        room = next(_rooms) * 16  # a request of several samples also uses the following rooms
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode


class PairedGeneration(Generation):
    """The decode server's output; ``prefill`` has the prefill server's."""

    def __init__(self, pair: Pair, tokens: int, fields: dict[str, Any]) -> None:
        super().__init__(pair.decode, tokens=tokens, **fields)
        fields |= {"input_ids": self._body["input_ids"]}
        self.prefill = Generation(pair.prefill, tokens=tokens, **fields)


@contextlib.contextmanager
def serve_pair(
    model: Path, *flags: str, folder: Path, of_decode: Sequence[str] = ()
) -> Iterator[Pair]:
    """Start a pair. ``flags`` go to both servers, ``of_decode`` to the decode server only."""
    port = free_port()
    common = (
        "--disaggregation-transfer-backend", "mooncake",
        "--max-total-tokens", str(POOL), "--chunked-prefill-size", str(CHUNK), *flags,
    )  # fmt: skip
    prefill = (
        *common, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port),
    )  # fmt: skip
    decode = (
        *common, "--disaggregation-mode", "decode",
        # the other backup needs CUDA's pinned memory
        "--disaggregation-decode-retraction-backup", "cpu_tensor", *of_decode,
    )  # fmt: skip
    with (
        serve(model, *prefill, log=folder / "prefill.log", env=_ENV) as first,
        serve(model, *decode, log=folder / "decode.log", env=_ENV) as second,
    ):
        yield Pair(first, second, port)


def live(server: Server, checkpoints: Path, version: int, kv: str = "fence") -> None:
    update(server, checkpoints, version, non_blocking=True, kv_cache=kv)


def versions_by_tokens(output: Output) -> list[str]:
    """Return the version of each token, as shown by the token itself."""
    return [f"v{made - FIRST}" for made in output.tokens]


def expect_labels(output: Output, *, prompt_by: list[str]) -> None:
    """Check the spans of the tokens and of the KV: the prompt's, and all tokens' but the last."""
    assert labels_of(output.meta["weight_versions"]) == versions_by_tokens(output)
    # the forward for the next token computes a token's KV
    assert labels_of(output.meta["kv_versions"]) == [*prompt_by, *versions_by_tokens(output)[1:]]
