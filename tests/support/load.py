"""Requests running during a test, and checks of their outputs."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from harness.marker import FIRST, VOCAB, token
from harness.server import PLAIN, Server
from harness.starting import UPSTREAM
from harness.streams import read_event
from sglang_inflight.client import cover_exactly, read_spans, version_per_token
from sglang_inflight.client.async_client import LIMITS

T = TypeVar("T")

# longest wait for an expected event; only a failure lasts this long
PATIENCE_S = 20.0 if UPSTREAM else 180.0
# messages to a scheduler, one per pass of its loop, to give it the chance to step
PASSES = 12

# tokens of a request ended by its test, enough for the slowest test
ENDLESS = 12_000

_serial = itertools.count()


def until(what: str, probe: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
    """Poll ``probe`` until it is true, and return its answer.

    A poll may cost a server more than a step, so later polls are fewer.
    """
    began = time.monotonic()
    while not (answer := probe()):
        waited = time.monotonic() - began
        assert waited < patience_s, f"not within {patience_s:g} s: {what}"
        time.sleep(0.005 if waited < 1 else 0.03)
    return answer


def prompt(length: int = 16) -> list[int]:
    """Return token ids whose first is in no prompt of the last few hundred calls.

    The prefix cache therefore reuses no token of one prompt for another.
    """
    serial = next(_serial)
    choose = random.Random(serial)
    texts = range(200, VOCAB)
    return [texts[serial % len(texts)], *choose.choices(texts, k=length - 1)]


@dataclass
class Output:
    """The latest state of one output of a request."""

    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    # number of chunks with a finish reason
    endings: int = 0
    # number of tokens and spans, as reported by each chunk
    chunks: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        reason = self.meta.get("finish_reason")
        return reason["type"] if reason else None


class Generation:
    """One request to ``/generate``, read by its own thread."""

    def __init__(
        self,
        server: Server,
        *,
        tokens: int,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = True,
        n: int = 1,
        outputs: int | None = None,
        rid: str | None = None,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Start the request. ``fields`` go into the body; ``outputs`` may differ from ``n``."""
        self.rid = rid or f"test-{next(_serial):06d}"
        self._server = server
        self.max_new_tokens = tokens
        self.status: int | None = None
        # the server's error, in place of an output
        self.refusal: str | None = None
        self._outputs = [Output() for _ in range(outputs or n)]
        self._comments: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        url = urlsplit(server.url)
        assert url.hostname is not None
        self._connection = HTTPConnection(url.hostname, url.port or 80, timeout=280)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "n": n}
        self._body = {
            # with several outputs, the group's name
            "rid": self.rid,
            "input_ids": list(input_ids if input_ids is not None else prompt()),
            "sampling_params": greedy | (sampling or {}),
            "stream": stream,
            **fields,
        }
        threading.Thread(target=self._read, name=self.rid, daemon=True).start()

    # ---- for tests -----------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of tokens of all outputs so far. Without a stream they come at the end."""
        with self._changed:
            return sum(len(output.tokens) for output in self._outputs)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the only output so far."""
        with self._changed:
            (output,) = self._outputs
            return output.tokens

    @property
    def comments(self) -> list[str]:
        """Comment lines of the event stream so far."""
        with self._changed:
            return list(self._comments)

    @property
    def has_ended(self) -> bool:
        with self._changed:
            return self._ended

    def wait_for_tokens(self, n: int) -> None:
        """Wait until each output has ``n`` tokens."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._ended or min(len(o.tokens) for o in self._outputs) >= n, PATIENCE_S
            )
            counts = [len(output.tokens) for output in self._outputs]
        assert reached, f"{self.rid} has {counts} tokens after {PATIENCE_S:g} s, not {n}"
        assert min(counts) >= n, (
            f"{self.rid} ended with {counts} tokens, before {n}: {self.refusal}"
        )

    def output_so_far(self) -> Output:
        """Return the current state of the only output, however the request ends."""
        with self._changed:
            (output,) = self._outputs
            return output

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until the connection has ended."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, patience_s)
            counts = [len(output.tokens) for output in self._outputs]
        assert ended, f"{self.rid} has not ended after {patience_s:g} s; it has {counts} tokens"

    def outputs(self, patience_s: float = PATIENCE_S) -> list[Output]:
        """Wait for the request's end, and return all outputs."""
        self.wait_for_end(patience_s)
        if self._error is not None:
            raise self._error
        return self._outputs

    def output(self, patience_s: float = PATIENCE_S) -> Output:
        (output,) = self.outputs(patience_s)
        assert output.endings == 1, (
            f"{self.rid} was answered {output.endings} times: {self.refusal}"
        )
        return output

    def abort(self) -> None:
        """Ask the server to abort the request, which keeps its tokens so far."""
        ask(self._server, "POST", "/abort_request", {"rid": self.rid})

    def disconnect(self) -> None:
        """Close the connection without a word, like a killed client."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- the reading thread --------------------------------------------------------

    def _read(self) -> None:
        try:
            self._connection.request(
                "POST", "/generate", json.dumps(self._body), {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            self.status = response.status
            if (response.getheader("Content-Type") or "").startswith("text/event-stream"):
                self._read_stream(response)
            else:
                content = json.loads(response.read())
                for index, chunk in enumerate(content if isinstance(content, list) else [content]):
                    self._take(index, chunk)
        except (OSError, HTTPException, ValueError) as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read_stream(self, response: HTTPResponse) -> None:
        for line in response:
            if line.startswith(b":"):
                with self._changed:
                    self._comments.append(line.decode().strip())
                    self._changed.notify_all()
                continue
            chunk = read_event(line)
            if chunk is not None:
                self._take(chunk.get("index", 0), chunk)

    def _take(self, index: int, chunk: dict[str, Any]) -> None:
        if "meta_info" not in chunk:
            self.refusal = json.dumps(chunk)
            return
        with self._changed:
            output = self._outputs[index]
            tokens = chunk["output_ids"]
            if tokens[: len(output.tokens)] != output.tokens:
                raise ValueError(f"{self.rid}: a chunk takes back tokens of the one before")
            output.tokens, output.meta = tokens, chunk["meta_info"]
            # upstream hands out its growing list of ids, so a chunk written late may hold more ids
            # than it counts
            counted = output.meta["completion_tokens"]
            output.chunks.append((counted, output.meta.get("weight_versions")))
            output.endings += chunk["meta_info"]["finish_reason"] is not None
            self._changed.notify_all()


def start(server: Server, n: int, /, **request: Any) -> list[Generation]:
    return [Generation(server, **request) for _ in range(n)]


def start_running(
    server: Server, n: int, /, *, at_least: int = 3, **request: Any
) -> list[Generation]:
    """Start ``n`` streams, and wait until each has ``at_least`` tokens."""
    generations = start(server, n, **request)
    for generation in generations:
        generation.wait_for_tokens(at_least)
    return generations


def more_tokens(generations: list[Generation]) -> None:
    """Wait until each generation has three more tokens."""
    due = [(generation, generation.count + 3) for generation in generations]
    until("all get more tokens", lambda: all(g.count >= n for g, n in due))


def until_made_by(generation: Generation, version: int) -> None:
    """Wait until the last three tokens are by ``version``. Older ones may still be on their way."""

    def has_come() -> bool:
        last = generation.output_so_far().meta["weight_versions"][-1]
        return bool(last["version"] == f"v{version}" and last["end"] - last["start"] >= 3)

    until(f"tokens by v{version}", has_come)


# ---- the scheduler -------------------------------------------------------------------

# open connections are kept: opening one takes longer than a scheduler's step
_client = httpx.Client(timeout=PATIENCE_S if UPSTREAM else 2 * PATIENCE_S, limits=LIMITS, **PLAIN)


def ask(server: Server, method: str, path: str, body: Any = None) -> Any:
    """Send a call, require a 200, and return the JSON answer."""
    response = _client.request(method, server.url + path, json=body, headers=server.headers)
    assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
    return response.json() if response.content else None


def status(server: Server) -> Any:
    return ask(server, "GET", "/inflight/status")


def until_waiting(server: Server, n: int) -> None:
    """Wait for ``n`` queued requests. Skipped on unpatched SGLang, which reports none."""
    if not UPSTREAM:
        until(f"{n} requests wait", lambda: status(server)["waiting"] == n)


def pass_boundaries(server: Server, times: int = PASSES) -> None:
    """Wait until each scheduler has answered at ``times`` step boundaries."""
    for _ in range(times):
        # unpatched SGLang's alternative takes five times as long
        ask(server, "GET", "/server_info" if UPSTREAM else "/inflight/status")


def settle(server: Server, generations: Sequence[Generation]) -> list[int]:
    """Return the number of tokens of each generation during a pause, once all have arrived.

    Fail if more tokens come with further step boundaries.
    """
    counts = [generation.count for generation in generations]
    for _ in range(5):
        pass_boundaries(server)
        before, counts = counts, [generation.count for generation in generations]
        if before == counts:
            return counts
    raise AssertionError(f"tokens come during a pause: {before}, then {counts}")


def pause(server: Server, mode: str, **fields: Any) -> Any:
    return ask(server, "POST", "/pause_generation", {"mode": mode, **fields})


def resume(server: Server, **fields: Any) -> Any:
    return ask(server, "POST", "/continue_generation", fields)


def update(server: Server, checkpoints: Path, version: int, **fields: Any) -> Any:
    """Update from disk, and return the receipt."""
    name = f"v{version}"
    body = {"model_path": str(checkpoints / name), "weight_version": name, **fields}
    receipt = ask(server, "POST", "/update_weights_from_disk", body)
    assert receipt["success"], receipt
    return receipt


# ---- checks --------------------------------------------------------------------------


def versions_of(output: Output) -> list[str]:
    return [span["version"] for span in output.meta["weight_versions"]]


def labels_of(spans: list[dict[str, Any]]) -> list[str]:
    """Return the version of each position."""
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def until_empty(server: Server) -> None:
    """Wait until no request runs or waits."""

    def is_empty() -> bool:
        now = status(server)
        return not now["running"] and not now["waiting"]

    until("the scheduler holds no request", is_empty)


def expect_spans(output: Output) -> None:
    """Check that the spans name the version shown by each token."""
    spans = read_spans(output.meta)
    assert spans, output.meta
    assert cover_exactly(spans, len(output.tokens)), f"{len(output.tokens)} tokens, spans {spans}"
    # a name after a plus is a second name of the same version
    labels = [label.partition("+")[0] for label in version_per_token(output.meta)]
    made_by = [f"v{made - FIRST}" for made in output.tokens]
    assert labels == made_by, f"spans {spans}, tokens {_runs(output.tokens)}"
    if not UPSTREAM:
        # each server counts epochs on its own
        own = [span for span in output.meta["weight_versions"] if "server" not in span]
        renamed = {span["version"] for span in own if "+" in span["version"]}
        epochs = [span["epoch"] for span in own if span["version"] not in renamed]
        assert epochs == sorted(set(epochs)), f"spans that are out of order: {spans}"
        assert [span["epoch"] for span in own] == sorted(span["epoch"] for span in own)
    assert output.meta["completion_tokens"] == len(output.tokens)


def expect_spans_in_chunks(output: Output) -> None:
    """Check that each chunk's spans agree with the last chunk's."""
    final = output.meta["weight_versions"]
    for count, spans in output.chunks:
        so_far = [{**s, "end": min(s["end"], count)} for s in final if s["start"] < count]
        assert spans == (so_far or final[:1]), f"of {count} tokens: {spans}, at the end {final}"


def expect_whole(generation: Generation) -> Output:
    """Wait for an unaborted end at full length, and check the spans."""
    output = generation.output()
    assert output.finish_reason == "length", output.meta
    assert len(output.tokens) == generation.max_new_tokens
    expect_spans(output)
    return output


def expect_all_go_on(generations: Iterable[Generation]) -> list[Output]:
    """Wait for more tokens on each generation, then abort it to make room for waiting ones."""
    generations = list(generations)
    due = {generation: generation.count + 3 for generation in generations}

    def all_went_on() -> bool:
        for generation, goal in list(due.items()):
            if generation.count >= goal:
                del due[generation]
                generation.abort()
            else:
                assert not generation.has_ended, f"{generation.rid} ended: {generation.refusal}"
        return not due

    until("every request gets more tokens", all_went_on)
    return [expect_aborted(generation) for generation in generations]


@contextlib.contextmanager
def requests_run_on(server: Server) -> Iterator[list[Generation]]:
    """Keep two requests running through the block, then check that they continue."""
    running = start_running(server, 2, tokens=ENDLESS)
    yield running
    expect_all_go_on(running)
    assert server.get("/server_info")["status_code"] == 200


def expect_aborted(generation: Generation) -> Output:
    """Check that the request was aborted with its tokens and with exact spans."""
    output = generation.output()
    assert output.finish_reason == "abort", output.meta
    assert len(output.tokens) < generation.max_new_tokens
    expect_spans(output)
    return output


def count_of(output: Output, version: int) -> int:
    return output.tokens.count(token(version))


def _runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return [(made, len(list(run))) for made, run in itertools.groupby(tokens)]
