"""Whole updates from every source, and checks of their effects."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from harness import marker
from harness.server import Server, free_port
from harness.starting import UPSTREAM
from harness.trainer import FLATTENED_BUCKET, Trainers, layout
from tests.support.checkpoint_engine import checkpoint_engine
from tests.support.load import (
    Generation,
    expect_spans,
    expect_whole,
    status,
    until,
    versions_of,
)

# fields of an update that runs beside generation; V1 names its version, too
LIVE: dict[str, Any] = {"non_blocking": True, "flush_cache": False}
V1: dict[str, Any] = {**LIVE, "weight_version": "v1"}
# a test expecting an answer soon must not wait for the default of ten minutes
TIMEOUT_S = 60.0

SOURCES = (
    "disk",
    "disk_shards",
    "tensor",
    "tensor_shared",
    "tensor_bucket",
    "distributed",
    "distributed_bucket",
    "ipc",
)

Weights = dict[str, torch.Tensor]

# on busy cores torch's manager process for shared memory may not answer for a second, and then
# torch gives up
SHARING_TRIES = 10


def by_value(weights: Weights | list[Any]) -> str:
    """Return a payload with the tensors themselves, readable any number of times."""
    pairs = list(weights.items()) if isinstance(weights, dict) else weights
    return base64.b64encode(pickle.dumps(pairs)).decode()


def by_reference(content: Any) -> str:
    """Return a payload with a handle to shared memory, like SGLang's own clients."""
    from sglang.srt.utils import MultiprocessingSerializer

    for _ in range(SHARING_TRIES):
        try:
            payload: str = MultiprocessingSerializer.serialize(content, output_str=True)
        except RuntimeError as error:
            if "Shared memory manager" not in str(error):
                raise
            refused = error
        else:
            return payload
    raise refused


def flatten(weights: Weights) -> dict[str, Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
    return {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }


def tensor_body(weights: Weights, *, ranks: int = 1, **fields: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": [by_value(weights)] * ranks, **fields}


class Sender:
    """Sends a whole version to a server, from any source."""

    def __init__(
        self,
        checkpoints: Path,
        shards: Path,
        trainers: Trainers,
        model: marker.Model = marker,
    ) -> None:
        self._model = model
        self._checkpoints = checkpoints
        self._shards = shards
        self._trainers = trainers
        # imports of SGLang's clients take seconds, so they must not run beside a test's requests
        by_reference(flatten({"warm": torch.zeros(1)}))

    def send(
        self, server: Server, source: str, version: int, *, ranks: int = 1, **fields: Any
    ) -> dict[str, Any]:
        """Send, and return the server's answer. ``ranks`` counts over all replicas."""
        with self.ready(server, source, version, ranks=ranks) as send:
            return send(**fields)

    @contextlib.contextmanager
    def ready(
        self, server: Server, source: str, version: int, *, ranks: int = 1
    ) -> Iterator[Callable[..., dict[str, Any]]]:
        """Yield a function that sends at once. Its arguments are further fields of the body."""
        weights = self._model.tensors(version)
        if source in ("disk", "disk_shards"):
            folder = self._checkpoints if source == "disk" else self._shards
            yield _post(server, "disk", model_path=str(folder / f"v{version}"))
        elif source == "ipc":
            with checkpoint_engine(weights) as (engine, handles):
                yield _post(server, "ipc", zmq_handles=handles)
            assert (engine.finished, engine.error) == (True, None)
        elif source.startswith("distributed"):
            trainer = self._trainers.get()
            with trainer.group(server, ranks=ranks):
                trainer.send(version, model=self._model, bucket="bucket" in source)
                load_format = FLATTENED_BUCKET if "bucket" in source else None
                fields = layout(version, self._model)
                yield _post(server, "distributed", **fields, load_format=load_format)
                assert trainer.answer() == "sent"
        else:
            make: Callable[[], str] = {
                "tensor": lambda: by_value(weights),
                "tensor_shared": lambda: by_reference(list(weights.items())),
                "tensor_bucket": lambda: by_reference(flatten(weights)),
            }[source]
            yield _post(
                server,
                "tensor",
                serialized_named_tensors=[make() for _ in range(ranks)],
                load_format=FLATTENED_BUCKET if "bucket" in source else None,
            )


def _post(server: Server, source: str, **body: Any) -> Callable[..., dict[str, Any]]:
    def send(**fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = server.post(
            f"/update_weights_from_{source}", {**body, **fields}, timeout=TIMEOUT_S
        )
        return answer

    return send


class Call:
    """A request sent in a thread, with its answer read later."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = server.post(path, body, timeout=2 * TIMEOUT_S)
            return answer

        self._begin(ask)

    @classmethod
    def of(cls, ask: Callable[[], dict[str, Any]]) -> Call:
        call = cls.__new__(cls)
        call._begin(ask)
        return call

    def _begin(self, ask: Callable[[], dict[str, Any]]) -> None:
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def _run(self, ask: Callable[[], dict[str, Any]]) -> None:
        try:
            self._answer = ask()
        except Exception as error:
            self._answer = error

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> dict[str, Any]:
        # only a failure lasts this long
        self._thread.join(4 * TIMEOUT_S)
        assert isinstance(self._answer, dict), self._answer
        return self._answer


def empty_rendezvous() -> dict[str, Any]:
    """Return the body of a join whose trainer never comes."""
    return {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    }


def succeed(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["status_code"] == 200, answer
    assert answer["success"] is True, answer
    return answer


def refuse(answer: dict[str, Any], *words: str, status_code: int = 400) -> dict[str, Any]:
    """Check that the answer is a refusal with ``words``, in SGLang's form or in ours."""
    assert answer["status_code"] == status_code, answer
    # SGLang's form has no such field
    assert not answer.get("success", False), answer
    for word in words:
        assert word in message_of(answer), answer
    return answer


def message_of(answer: dict[str, Any]) -> str:
    """Return the message of an answer, in SGLang's form or in ours."""
    message: str = answer.get("message") or answer["error"]["message"]
    return message


def serving(server: Server) -> list[tuple[Any, ...]]:
    """Return each rank's served version. It changes with a commit only."""
    if UPSTREAM:
        return [(server.get("/model_info")["weight_version"],)]
    return [
        (rank["dp_rank"], rank["tp_rank"], rank["weight_version"], rank["epoch"], rank["digest"])
        for rank in status(server)["ranks"]
    ]


def drop_session(server: Server) -> None:
    """Drop a session left open by a failed test, which would take in the next test's updates."""
    # a test may have ended the server
    with contextlib.suppress(httpx.HTTPError):
        server.post("/abort_weight_update", {})


def staging(server: Server) -> list[dict[str, Any]]:
    return [rank["staging"] for rank in status(server)["ranks"]]


def until_staging(server: Server, *, tensors: int = 0) -> None:
    """Wait until every rank has an open update with ``tensors`` tensors."""
    until(
        f"an update is going on, with {tensors} tensors",
        lambda: all(s["state"] != "empty" and s["tensors"] >= tensors for s in staging(server)),
    )


def until_idle(server: Server) -> None:
    until("no update is open", lambda: all(s["state"] == "empty" for s in staging(server)))


def misshapen(folder: Path, config: Mapping[str, object] = marker.CONFIG) -> Path:
    """Write version 5 with a last tensor that is too small, to fail after all others."""
    weights = marker.tensors(5)
    name = "model.norm.weight"
    weights[name] = weights[name][:8].clone()
    return marker.write(folder, weights, config)


def expect_served(server: Server, version: int) -> None:
    """Check by a new request that the weights of ``version`` are served."""
    tokens = Generation(server, tokens=3, stream=False).output().tokens
    assert tokens == [marker.token(version)] * 3


def expect_versions(generations: Iterable[Generation], versions: list[int]) -> None:
    """Check that each request ended at full length, on these versions in order."""
    for generation in generations:
        found = versions_of(expect_whole(generation))
        assert found == [f"v{version}" for version in versions], f"{generation.rid}: {found}"


def expect_to_run_on(
    server: Server, generations: Sequence[Generation], versions: list[int]
) -> None:
    """Wait for tokens of the last version, abort, and check the versions in order.

    For endless requests, so an update may take any time.
    """
    last = [marker.token(versions[-1])] * 3
    for generation in generations:

        def makes_the_last(generation: Generation = generation) -> bool:
            return generation.tokens[-3:] == last

        until(f"{generation.rid} makes tokens of v{versions[-1]}", makes_the_last)
        assert not generation.has_ended
        server.post("/abort_request", {"rid": generation.rid})
    for generation in generations:
        output = generation.output()
        expect_spans(output)
        found = versions_of(output)
        assert found == [f"v{version}" for version in versions], f"{generation.rid}: {found}"
