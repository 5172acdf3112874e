"""Thousands of bodies to each of our routes, under running requests.

No body may cause a 5xx, a lost request, or a token by other weights than those in place. Valid
bodies send the weights already served, so a token of other weights is an error.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from harness import marker
from harness.server import PLAIN, Server
from harness.starting import STEP_MS
from tests.support.load import (
    ENDLESS,
    Generation,
    resume,
    start,
    start_running,
)
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.routes import Route, routes
from tests.support.updates import by_value, serving

SEED = int(os.environ.get("INFLIGHT_TEST_SEED", "20261121"))
EXAMPLES = int(os.environ.get("INFLIGHT_TEST_FUZZ_EXAMPLES", "150"))
# routes that accept many of the bodies
ACCEPTED = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/begin_weight_update",
)
# times too short to matter to a request or to the sender
SHORT_S = st.floats(0.001, 0.05)
KINDS = ("kv_cache", "weights", "cuda_graph")
# timeout of an update without a waiting caller, on busy cores too
AMPLE_S = 20.0
# longer than the test: at its end a drain ends the running requests
DRAIN_S = 3600.0
# what a route's valid bodies leave behind, and the call that takes it back
UNDONE_BY = {
    # a session left open would keep the next one waiting
    "/begin_weight_update": ("/abort_weight_update", {}),
    # a server left draining would refuse the requests of the load
    "/inflight/drain": ("/inflight/drain", {"cancel": True}),
}

FLAVOURS["fuzzed_server"] = Flavour(
    ("--weight-version", "v0", "--max-running-requests", "8"),
    {
        "SGLANG_INFLIGHT_GROUP_TIMEOUT_S": "0.2",
        "SGLANG_INFLIGHT_UPDATE_TIMEOUT_S": "2",
        # the steps of the requests beside the bodies take a core, and prove nothing more by number
        STEP_MS: "20",
    },
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "\x00", "../..", "v0", "a" * 5000, "\U0001f4a5"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
# JSON beyond the output of an encoder
RAW = st.binary(min_size=1, max_size=60) | st.sampled_from(
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"NaN",
        b'{"lease_s": 1e999}',
        b'{"mode": "in_place", "mode": "retract", "timeout_s": 0.01}',
        b'{"mode": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b"null",
        b"[]",
    ]
)


class Bodies:
    """Strategies for a route's bodies, from the route's published JSON schema.

    ``_meant`` overrides the schema where a valid value would end a request or would block the
    sender: waiting for an absent trainer, or for running requests to end. The overridden fields
    that have a harmful default are always there, and those of ``_never`` are never a JSON value
    that the route could take.
    """

    def __init__(self, route: Route, checkpoint: Path) -> None:
        self._fields = route.schema["properties"]
        self._required = set(route.schema.get("required", ()))
        norm = {"model.norm.weight": marker.tensors(0)["model.norm.weight"]}
        self._meant: dict[str, st.SearchStrategy[Any]] = {
            "mode": st.sampled_from(["in_place", "retract", "wait"]),
            "non_blocking": st.just(True),
            "abort_all_requests": st.just(False),
            "lease_s": SHORT_S,
            "deadline_s": st.just(DRAIN_S),
            "timeout_s": SHORT_S | st.just(AMPLE_S) if "model_path" in self._fields else SHORT_S,
            "on_busy": st.sampled_from(["refuse", "replace"]),
            "model_path": st.sampled_from([str(checkpoint), str(checkpoint / "no"), "/dev/null"]),
            "load_format": st.sampled_from([None, "auto", "flattened_bucket", "moon"]),
            "serialized_named_tensors": st.lists(
                st.sampled_from([by_value(norm), by_value([]), "AAAA", "gASVAAAA"]), max_size=2
            ),
            "zmq_handles": st.dictionaries(st.text(max_size=8), st.just("ipc:///nowhere")),
            "backend": st.sampled_from(["gloo", "moon"]),
            "master_address": st.sampled_from(["127.0.0.1", "no.such.host.invalid"]),
            "pause_id": st.none() | st.text(max_size=4),
            "expected_version": st.none() | st.sampled_from(["v0", "v1"]),
            "weight_version": st.none() | st.text(max_size=4),
            "tags": st.none() | st.lists(st.sampled_from(KINDS), max_size=3),
            "group_name": st.sampled_from(["weight_update_group", "other", "\x00"]),
        }
        # always present: their defaults are among the overridden values
        never = {"abort_all_requests", "deadline_s"}
        always = {"mode", "non_blocking", "lease_s", "timeout_s"} | never
        self._always = always & set(self._fields)
        self._never = never & self._always

    def any(self) -> st.SearchStrategy[bytes]:
        # a union of strategies would be flattened, which changes the odds
        kinds = [self._sound()] * 4 + [self._with_one_flaw()] * 3 + [self._beside_the_point()]
        objects = st.sampled_from(kinds).flatmap(lambda kind: kind)
        # an empty body is a pause that aborts, or an update that waits for running requests
        encoded = objects.filter(lambda body: body != {}).map(_encode)
        return st.sampled_from([encoded] * 7 + [RAW]).flatmap(lambda kind: kind)

    def _sound(self) -> st.SearchStrategy[dict[str, Any]]:
        wanted = self._required | self._always
        fields = {name: self._value(name) for name in self._fields}
        return st.fixed_dictionaries(
            {name: fields[name] for name in sorted(wanted)},
            optional={name: fields[name] for name in sorted(set(fields) - wanted)},
        )

    def _with_one_flaw(self) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from([*self._fields, "no_such_field"]) | st.text(max_size=8)
        return st.builds(self._flaw, self._sound(), names, JSON)

    def _beside_the_point(self) -> st.SearchStrategy[Any]:
        """Draw any JSON value. Objects get valid fields too: routes may ignore others."""
        return st.builds(
            lambda body, other: {**other, **body} if isinstance(other, dict) else other,
            self._sound(),
            JSON,
        )

    def _flaw(self, body: dict[str, Any], name: str, flaw: Any) -> dict[str, Any]:
        # no flaw may be one of the overridden values
        if name in self._always and (flaw in (None, False) or name in self._never):
            flaw = "flaw"
        return {**body, name: flaw}

    def _value(self, name: str) -> st.SearchStrategy[Any]:
        return self._meant[name] if name in self._meant else _of(self._fields[name])


def _of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of([_of(choice) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return st.lists(_of(schema.get("items", {})), max_size=4)
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    known: dict[Any, st.SearchStrategy[Any]] = {
        "string": st.text(max_size=12),
        "boolean": st.booleans(),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "null": st.none(),
        "object": st.dictionaries(st.text(max_size=8), SCALARS, max_size=3),
    }
    return known.get(kind, JSON)


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture
def fuzzed_server(pool: ServerPool, checkpoints: Path) -> Any:
    yield pool.get(FLAVOURS["fuzzed_server"])
    pool.restore()


class Load:
    """Requests running throughout. Only their length may end them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._running = start_running(server, 2, tokens=ENDLESS)

    def check(self) -> None:
        for index, generation in enumerate(self._running):
            if generation.has_ended:
                assert generation.output().finish_reason == "length"
                (self._running[index],) = start(self._server, 1, tokens=ENDLESS)
            expect_old_weights(generation)

    def end(self) -> None:
        for generation in self._running:
            generation.wait_for_tokens(generation.count + 3)
            expect_old_weights(generation)
            generation.abort()
            assert generation.output().finish_reason == "abort"


def expect_old_weights(generation: Generation) -> None:
    assert set(generation.tokens) <= {marker.token(0)}


def expect_answer(body: bytes, answer: httpx.Response) -> None:
    content = answer.json()
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 409), (body[:500], answer.status_code, answer.text)
        assert content["success"] is False
        assert content["message"], body[:500]


def undo(client: httpx.Client, route: Route) -> None:
    if route.path in UNDONE_BY:
        path, body = UNDONE_BY[route.path]
        client.post(path, json=body)


def send_bodies(client: httpx.Client, route: Route, checkpoint: Path) -> Counter[int]:
    """Send drawn bodies to the route, and count the answers by status."""
    statuses: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(body=Bodies(route, checkpoint).any())
    def send(body: bytes) -> None:
        answer = client.post(route.path, content=body)
        expect_answer(body, answer)
        statuses[answer.status_code] += 1
        undo(client, route)

    send()
    return statuses


# what proxies, scripts and mistakes put around a body
METHODS = ["POST"] * 8 + ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "MOVE"]
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *("Accept", "Accept-Encoding", "Authorization", "Content-Encoding", "Content-Type"),
            *("Cookie", "Forwarded", "Host", "If-Match", "Origin", "Range", "Referer", "TE"),
            *("Upgrade", "User-Agent", "X-Forwarded-For", "X-Forwarded-Proto", "X-Request-Id"),
        ]
    ).map(str.encode),
    st.sampled_from(
        [
            *(b"", b"gzip", b"identity, br;q=0", b"application/json; charset=utf-16", b"websocket"),
            *(b"multipart/form-data; boundary=x", b"text/event-stream", b"bytes=0-0,5-", b"*/*"),
            *(
                b"Bearer",
                b"Bearer \xff\xfe",
                b"Basic Og==",
                b"::1",
                b"a" * 4000,
                b"\xf0\x9f\x92\xa5",
            ),
        ]
    ),
    max_size=4,
)
QUERIES = st.sampled_from(
    ["", "?", "?mode=abort", "?lease_s=nan&lease_s=1", "?%00=%ff", "?" + "a&" * 2000, "?a[b]=c;d"]
)


def send_around(client: httpx.Client, route: Route, checkpoint: Path) -> Counter[int]:
    """Send drawn bodies like ``send_bodies``, with odd methods, headers and queries."""
    statuses: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=max(20, EXAMPLES // 3),
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        method=st.sampled_from(METHODS),
        headers=HEADERS,
        query=QUERIES,
        body=Bodies(route, checkpoint).any(),
        in_chunks=st.booleans(),
    )
    def send(
        method: str, headers: dict[bytes, bytes], query: str, body: bytes, in_chunks: bool
    ) -> None:
        content = iter([body[:1], b"", body[1:]]) if in_chunks else body
        answer = client.request(method, route.path + query, headers=headers, content=content)
        said = (method, headers, query, body[:500], answer.status_code, answer.text[:500])
        assert answer.status_code < 500, said
        if method == "POST":
            expect_answer(body, answer)
        statuses[answer.status_code] += 1
        undo(client, route)

    send()
    return statuses


def test_odd_methods_headers_and_queries_get_no_5xx(
    fuzzed_server: Server, checkpoints: Path
) -> None:
    server = fuzzed_server
    load = Load(server)
    answered: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=30, **PLAIN) as client:
        for route in routes(server):
            if route.method == "POST":
                answered += send_around(client, route, checkpoints / "v0")
                undo(client, route)
                for kind in KINDS:
                    client.post("/resume_memory_occupation", json={"tags": [kind]})
                resume(server)
                load.check()
                assert server.is_alive()
    load.end()
    print(answered)
    assert answered[200] > 0
    assert answered[405] > 0
    (last,) = start(server, 1, tokens=8)
    assert last.output().tokens == [marker.token(0)] * 8


def malformed(path: str) -> list[bytes]:
    """Return truncated and malformed requests. A whole body pauses for a moment."""
    target, body = path.encode(), b'{"mode": "in_place", "lease_s": 0.01, "timeout_s": 0.01}'
    head = b"POST " + target + b" HTTP/1.1\r\nHost: here\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    in_one_chunk = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return [
        head,
        head + b"Content-Length: 100\r\n\r\n" + body,
        head + b"Content-Length: 2\r\n\r\n" + body,
        head + b"Content-Length: -1\r\n\r\n" + body,
        head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + body,
        head + b"Content-Length: 3\r\n" + in_one_chunk,
        head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
        head + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        chunked + b"zz\r\n" + body,
        chunked + b"ffffffffffffffff\r\n" + body,
        chunked + b"4\r\n{\r\n",
        whole * 3,
        whole.replace(b"HTTP/1.1", b"HTTP/1.0"),
        whole.replace(b"HTTP/1.1", b"HTTP/9.9"),
        whole.replace(b"POST", b"post"),
        *(
            whole.replace(target, odd, 1)
            for odd in (target + b"/", b"/" + target, target + b"%00", b"/./x/.." + target)
        ),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ]


def send_raw(server: Server, content: bytes) -> bytes:
    """Send ``content``, close the sending side, and return the start of the answer, if any."""
    where = urlsplit(server.url)
    connection = socket.create_connection((where.hostname or "", where.port or 0), timeout=30)
    # the server may close the connection before it has read everything
    with connection as sender, suppress(ConnectionError):
        sender.sendall(content)
        # ENOTCONN, when the server was faster, is no ConnectionError
        with suppress(OSError):
            sender.shutdown(socket.SHUT_WR)
        return sender.recv(1 << 12)
    return b""


def test_malformed_http_gets_no_5xx(fuzzed_server: Server) -> None:
    server = fuzzed_server
    load = Load(server)
    before = serving(server)
    with httpx.Client(base_url=server.url, timeout=30, **PLAIN) as client:
        for route in routes(server):
            if route.method != "POST":
                continue
            for content in malformed(route.path):
                answer = send_raw(server, content)
                assert not answer.startswith(b"HTTP/1.1 5"), (content[:300], answer)
            undo(client, route)
            for kind in KINDS:
                client.post("/resume_memory_occupation", json={"tags": [kind]})
            resume(server)
            load.check()
    assert serving(server) == before
    load.end()


def test_drawn_bodies_get_no_5xx_and_change_no_token(
    fuzzed_server: Server, checkpoints: Path
) -> None:
    server = fuzzed_server
    load = Load(server)
    answered: dict[str, Counter[int]] = {}
    with httpx.Client(base_url=server.url, timeout=30, **PLAIN) as client:
        for route in routes(server):
            if route.method != "POST":
                continue

            answered[route.path] = send_bodies(client, route, checkpoints / "v0")
            undo(client, route)
            # released by a call at a moment without a running request
            for kind in KINDS:
                client.post("/resume_memory_occupation", json={"tags": [kind]})
            resume(server)
            load.check()
            assert server.is_alive()
    load.end()
    print(answered)
    # a fuzzer whose bodies are all refused tests nothing
    for path in ACCEPTED:
        assert answered[path][200] > 0, answered[path]
    assert sum(map(Counter.total, answered.values())) >= EXAMPLES * len(answered)
    (last,) = start(server, 1, tokens=8)
    assert last.output().tokens == [marker.token(0)] * 8
