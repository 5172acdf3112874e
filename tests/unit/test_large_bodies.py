"""A body is read the same in chunks of any size, and its large tensors become files."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http import large_bodies
from sglang_inflight.frontend.http.large_bodies import LARGE_STRING_BYTES, LargeBody, large_body
from sglang_inflight.messages import PayloadFile
from sglang_inflight.vocabulary.bodies import TensorBody
from sglang_inflight.vocabulary.errors import Refused, TooLarge
from tests.support.open_files import open_files

LARGE = LARGE_STRING_BYTES
CONTENT = random.Random(0).randbytes(3 * LARGE + 1)


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def chunks(text: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


def feed(body: LargeBody, parts: Iterable[bytes]) -> TensorBody:
    for part in parts:
        body.feed(part)
    decoded = decode(bytes(body._rest), TensorBody)
    payloads: Any = body.put_back(decoded.serialized_named_tensors)
    decoded.serialized_named_tensors = payloads
    return decoded


def contents(body: TensorBody) -> list[bytes]:
    payloads: list[Any] = body.serialized_named_tensors
    return [Path(p.path).read_bytes() if isinstance(p, PayloadFile) else p for p in payloads]


def take(text: bytes, size: int = 10_000) -> tuple[TensorBody, list[bytes]]:
    with large_body() as body:
        taken = feed(body, chunks(text, size))
        return taken, contents(taken)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, LARGE - 1, LARGE, LARGE + 1, 1 << 30])
def test_payloads_of_all_sizes_are_read(size: int) -> None:
    sizes = [0, 1, 2, 3, 1000, LARGE * 3 // 4 - 1, LARGE * 3 // 4, LARGE * 3 // 4 + 1, len(CONTENT)]
    if size < 1000:
        sizes = [0, 2, 1000, LARGE + 1]
    payloads = [CONTENT[:n] for n in sizes]
    fields = {"weight_version": 'v"1\\', "load_format": "ü\n", "flush_cache": False}
    text = json.dumps({"serialized_named_tensors": [*map(encode, payloads)], **fields}).encode()
    body, found = take(text, size)
    assert found == payloads
    assert {name: getattr(body, name) for name in fields} == fields


def test_small_payloads_need_no_file() -> None:
    text = json.dumps({"serialized_named_tensors": [encode(CONTENT[:1000])]}).encode()
    body, _ = take(text)
    assert body.serialized_named_tensors == [CONTENT[:1000]]


@pytest.mark.parametrize("size", [1, 5, 6, 1000, 1 << 30])
def test_escaped_base64_is_read(size: int) -> None:
    """Some languages escape slashes in JSON."""
    content = CONTENT[: LARGE + 100]
    text = encode(content).replace("/", r"\/").replace("+", r"\u002B")
    _, found = take(b'{"serialized_named_tensors": ["%b"]}' % text.encode(), size)
    assert found == [content]


@pytest.mark.parametrize(
    "spoilt",
    [
        "%" * 2 * LARGE,
        "A" * (2 * LARGE + 1),
        "AA==" * LARGE,
        "A" * 2 * LARGE + "=AAA" + "A" * LARGE,
        "A" * 2 * LARGE + "ü",
        "A" * 2 * LARGE + r"\"",
        "A" * 2 * LARGE + r"\x41",
        "A" * 2 * LARGE + r"\u00",
    ],
    ids=range(8),
)
def test_invalid_base64_is_refused(spoilt: str) -> None:
    text = b'{"serialized_named_tensors": ["%b"]}' % spoilt.encode()
    for size in (1000, 1 << 30):
        with pytest.raises(Refused, match="bad request body"):
            take(text, size)


@pytest.mark.parametrize(
    "text",
    [
        {"serialized_named_tensors": [], "weight_version": "A" * 2 * LARGE},
        {"serialized_named_tensors": [], "A" * 2 * LARGE: 1},
        {"serialized_named_tensors": "A" * 2 * LARGE},
        {"serialized_named_tensors": [["A" * 2 * LARGE]]},
    ],
)
def test_large_string_outside_payloads_is_refused(text: Any) -> None:
    with pytest.raises(Refused, match="bad request body"):
        take(json.dumps(text).encode())


@pytest.mark.parametrize("cut", [1, 30, 100, LARGE, 2 * LARGE, -1, -2, -3])
def test_truncated_body_is_refused(cut: int) -> None:
    text = json.dumps({"serialized_named_tensors": [encode(CONTENT)]}).encode()[:cut]
    with pytest.raises(Refused, match="bad request body"):
        take(text)


def test_short_reads_of_a_payload_file_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads no more than 2 GiB at a time."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1000), at))
    text = json.dumps({"serialized_named_tensors": [encode(CONTENT)]}).encode()
    with large_body() as body:
        body.feed(text)
        payloads = decode(bytes(body._rest), TensorBody).serialized_named_tensors
        assert body.put_back(payloads, as_files=False) == [CONTENT]


def test_body_cannot_name_a_server_file() -> None:
    forged = {"type": "PayloadFile", "path": "/etc/passwd"}
    with pytest.raises(Refused, match="Expected `bytes`, got `object`"):
        take(json.dumps({"serialized_named_tensors": [forged]}).encode())


def test_oversized_body_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "MOST_REST_BYTES", 2 * LARGE)
    small = ["A" * 1000] * (3 * LARGE // 1000)
    with pytest.raises(TooLarge, match="more than"):
        take(json.dumps({"serialized_named_tensors": small}).encode())
    monkeypatch.setattr(large_bodies, "MOST_LARGE_STRINGS", 3)
    with pytest.raises(TooLarge, match="more than 3"):
        take(json.dumps({"serialized_named_tensors": ["A" * 2 * LARGE] * 4}).encode())


def test_payload_files_are_closed_after_the_call() -> None:
    before = open_files("inflight-payload")
    text = json.dumps({"serialized_named_tensors": [encode(CONTENT)] * 3}).encode()
    take(text)
    for spoilt in (text[:-10], text[: LARGE * 2], text.replace(b"]", b"]]")):
        with pytest.raises(Refused):
            take(spoilt)
    assert open_files("inflight-payload") <= before


def test_other_json_is_unchanged() -> None:
    random.seed(1)
    values: list[Any] = [
        None,
        True,
        -1.5,
        "",
        'a"b',
        "\\",
        '\\"',
        "\u2028é",
        [],
        {},
        {"k\\": ["]"]},
    ]
    for _ in range(50):
        value = {str(i): random.choice(values) for i in range(20)}
        text = json.dumps(value, ensure_ascii=random.random() < 0.5).encode()
        for size in (1, 2, 3, 50):
            with large_body() as body:
                for part in chunks(text, size):
                    body.feed(part)
                assert msgspec.json.decode(bytes(body._rest)) == value
