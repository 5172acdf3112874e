"""The client's reaction to late, lost and malformed answers, without a server."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sglang_inflight.cli import app
from sglang_inflight.client import (
    Client,
    Fleet,
    FleetRefused,
    FleetSplit,
    NoAnswer,
    PauseLost,
    WrongAnswer,
)
from sglang_inflight.client.answers import MOST_BYTES
from sglang_inflight.vocabulary import errors
from tests.support.broken_server import BrokenServer
from tests.support.load import until

STATUS, PAUSE, CONTINUE = "/inflight/status", "/pause_generation", "/continue_generation"
BEGIN, SEAL, END = "/begin_weight_update", "/seal_weight_update", "/end_weight_update"
ABORT, ROLLBACK = "/abort_weight_update", "/inflight/rollback"
DISK = "/update_weights_from_disk"

# how long a test waits for an answer in vain
SHORT_S = 0.3


@pytest.fixture
def server() -> Iterator[BrokenServer]:
    with BrokenServer().serving() as server:
        yield server


@pytest.fixture
def beside() -> Iterator[BrokenServer]:
    with BrokenServer().serving() as server:
        yield server


@pytest.fixture
def fleet(server: BrokenServer, beside: BrokenServer) -> Iterator[Fleet]:
    # the other server has to answer within the timeout
    with Fleet([server.url, beside.url], timeout_s=4 * SHORT_S) as fleet:
        yield fleet


def refusal(kind: type[errors.InflightError]) -> bytes:
    inner = {"message": "no", "type": kind.__name__, "code": kind.status}
    return json.dumps({"success": False, "message": "no", "error": inner}).encode()


@pytest.mark.parametrize("kind", errors.ERRORS.values(), ids=lambda kind: kind.__name__)
def test_error_type_survives_http(server: BrokenServer, kind: type[errors.InflightError]) -> None:
    server.answers[ROLLBACK] = (kind.status, refusal(kind))
    with Client(server.url) as client, pytest.raises(errors.InflightError, match="no") as raised:
        client.roll_back()
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("status", "content", "kind", "sentence"),
    [
        (400, b'{"message": "bad"}', errors.Refused, "bad"),
        (401, b'{"error": "Unauthorized"}', errors.Refused, "Unauthorized"),
        (404, b'{"detail": "Not Found"}', errors.Refused, "Not Found"),
        (409, b"", errors.Conflict, "Conflict"),
        (413, b"<html>too large</html>", errors.TooLarge, "too large"),
        (422, b'{"error": {"type": "BadRequestError", "message": "bad"}}', errors.Refused, "bad"),
        (501, b'["no"]', errors.NotOffered, "no"),
        (504, b"<html>gateway</html>", errors.OutcomeUnknown, "gateway"),
        (500, b"<html>oops</html>", httpx.HTTPStatusError, "500"),
        (502, b"", httpx.HTTPStatusError, "502"),
    ],
)
def test_error_without_a_type_maps_by_status(
    server: BrokenServer, status: int, content: bytes, kind: type[Exception], sentence: str
) -> None:
    server.answers[ROLLBACK] = (status, content)
    with Client(server.url) as client, pytest.raises(kind, match=sentence) as raised:
        client.roll_back()
    assert type(raised.value) is kind


GARBLED = [b"", b"<html>hello</html>", b'{"success": tr', b"\xff\xfe{}", b"[1]", b"[" * 100_000]


@pytest.mark.parametrize("content", GARBLED, ids=["none", "page", "cut", "bytes", "list", "deep"])
def test_malformed_answer_raises_wrong_answer(server: BrokenServer, content: bytes) -> None:
    server.answers[DISK] = (200, content)
    with Client(server.url) as client, pytest.raises(WrongAnswer, match="no JSON object"):
        client.update_from_disk("/x")


# Python codecs without text, a name without a codec, and a codec of another encoding
CHARSETS = ["zlib", "hex", "rot13", "idna", "undefined", "nonsense", "utf-16"]


@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize(
    ("status", "kind"),
    [(200, WrongAnswer), (400, errors.Refused), (500, httpx.HTTPStatusError)],
)
def test_unknown_charset_raises_by_status(
    server: BrokenServer, charset: str, status: int, kind: type[Exception]
) -> None:
    server.answers[ROLLBACK] = (status, b"<html>hello</html>")
    server.types[ROLLBACK] = f"text/html; charset={charset}"
    with Client(server.url) as client, pytest.raises(kind) as raised:
        client.roll_back()
    assert type(raised.value) is kind
    assert status == 500 or "<html>hello" in str(raised.value)


@pytest.mark.parametrize("status", [200, 500])
def test_html_answer_to_commit_splits_fleet(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet, status: int
) -> None:
    beside.answers[END] = (status, b"<html>hello</html>")
    beside.types[END] = "text/html; charset=zlib"
    with pytest.raises(FleetSplit) as split:
        fleet.update_from_disk("/x")
    assert list(split.value.report.answers) == [server.url]
    assert split.value.report.uncertain == [beside.url]


@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (200, WrongAnswer, f"more than {MOST_BYTES} bytes"),
        (409, errors.Conflict, "<br>"),
        (502, httpx.HTTPStatusError, "502"),
    ],
)
def test_endless_answer_is_cut_off(
    server: BrokenServer, status: int, kind: type[Exception], sentence: str
) -> None:
    """The client keeps no more of an answer than its maximum size."""
    server.answers[ROLLBACK] = (status, b"<br>" * 4096)
    server.endless.add(ROLLBACK)
    with Client(server.url) as client, pytest.raises(kind, match=sentence) as raised:
        client.roll_back()
    assert type(raised.value) is kind


# ---- servers without us ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((404, b'{"detail":"Not Found"}'), "runs without SGLang Inflight"),
        ((200, b'{"active": false, "message": "two tokenizers"}'), "two tokenizers"),
    ],
    ids=["not installed", "switched off"],
)
@pytest.mark.parametrize(
    "call",
    [
        Client.status,
        Client.pause,
        Client.roll_back,
        lambda client: client.update_from_disk("/x"),
        lambda client: client.session().__enter__(),
        lambda client: client.paused().__enter__(),
    ],
    ids=["status", "pause", "roll_back", "update", "session", "paused"],
)
def test_server_without_us_is_sent_no_change(
    server: BrokenServer,
    call: Callable[[Client], object],
    answer: tuple[int, bytes],
    sentence: str,
) -> None:
    """Such a server would ignore our fields and answer 200."""
    server.answers[STATUS] = answer
    with Client(server.url) as client, pytest.raises(errors.NotOffered, match=sentence):
        call(client)
    assert set(server.arrivals) == {STATUS}


def test_fleet_with_server_without_us_is_refused(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet
) -> None:
    beside.answers[STATUS] = (404, b'{"detail":"Not Found"}')
    with pytest.raises(FleetRefused, match="runs without SGLang Inflight"):
        fleet.update_from_disk("/x")
    assert set(beside.arrivals) == {STATUS}
    assert END not in server.arrivals


def test_status_is_asked_once_per_client(server: BrokenServer) -> None:
    with Client(server.url) as client:
        client.pause()
        client.roll_back()
        client.resume()
    assert server.arrivals == [STATUS, PAUSE, ROLLBACK, CONTINUE]


def test_unanswered_status_is_asked_again(
    server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call goes on, and the next call asks again."""
    monkeypatch.setattr("sglang_inflight.client.async_client.ASK_S", SHORT_S)
    with Client(server.url) as client:
        server.answers[STATUS] = (504, refusal(errors.RankSilent))
        client.pause()
        server.fall_silent(STATUS)
        client.roll_back()
    assert server.arrivals == [STATUS, PAUSE, STATUS, ROLLBACK]


@pytest.mark.parametrize(
    ("path", "call", "content", "missing"),
    [
        (STATUS, Client.status, b"{}", "state"),
        (PAUSE, Client.pause, b'{"mode": "abort"}', "pause_id"),
        (CONTINUE, Client.resume, b'{"message": "ok"}', "paused"),
        (ROLLBACK, Client.roll_back, b'{"success": true}', "message"),
    ],
)
def test_answer_without_required_field_is_wrong(
    server: BrokenServer,
    path: str,
    call: Callable[[Client], object],
    content: bytes,
    missing: str,
) -> None:
    server.answers[path] = (200, content)
    with Client(server.url) as client, pytest.raises(WrongAnswer, match=f"`{missing}`"):
        call(client)


def test_wrong_answer_from_one_of_fleet_is_uncertain(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet
) -> None:
    for path in (STATUS, ROLLBACK):
        beside.answers[path] = (200, b"<html>hello</html>")
    report = fleet.status()
    assert (list(report.answers), report.uncertain) == ([server.url], [beside.url])
    with pytest.raises(FleetSplit, match="may be split") as split:
        fleet.roll_back()
    assert split.value.report.uncertain == [beside.url]
    assert isinstance(split.value.report.failures[beside.url], WrongAnswer)


def test_garbled_renewal_answer_keeps_renewing(server: BrokenServer) -> None:
    with Client(server.url) as client, client.paused(lease_s=SHORT_S):
        server.answers[PAUSE] = (200, b"<html>hello</html>")
        server.wait_for(PAUSE, 4)


def test_refused_renewal_stops_renewing(
    server: BrokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An unanswered renewal does not keep the next renewal from coming in time."""
    with Client(server.url) as client, client.paused(lease_s=SHORT_S):
        server.fall_silent(PAUSE)
        server.wait_for(PAUSE, 3)
        server.answers[PAUSE] = (409, refusal(errors.Conflict))
        server.speak()
        until("the renewing is over", lambda: "is over: no" in caplog.text)


# ---- exit codes of the commands ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.Refused, 1),
        (errors.RankSilent, 1),
        (errors.Conflict, 3),
        (errors.OutcomeUnknown, 4),
        (errors.HalfDone, 4),
    ],
)
def test_error_type_chooses_exit_code(
    server: BrokenServer, kind: type[errors.InflightError], code: int
) -> None:
    server.answers[ROLLBACK] = (kind.status, refusal(kind))
    result = CliRunner().invoke(app, ["rollback", "--url", server.url])
    assert (result.exit_code, result.stderr) == (code, "no\n")


@pytest.mark.parametrize("answer", [(200, b"<html>hello</html>"), (500, b"")])
def test_wrong_answer_exits_4(server: BrokenServer, answer: tuple[int, bytes]) -> None:
    server.answers[ROLLBACK] = answer
    result = CliRunner().invoke(app, ["rollback", "--url", server.url])
    assert (result.exit_code, server.url in result.stderr) == (4, True)


# ---- silence -----------------------------------------------------------------------------

CALLS: list[tuple[str, Callable[[Client], object]]] = [
    (STATUS, Client.status),
    (PAUSE, Client.pause),
    (CONTINUE, Client.resume),
    (DISK, lambda client: client.update_from_disk("/x", timeout_s=SHORT_S)),
    (ROLLBACK, Client.roll_back),
]


@pytest.mark.parametrize(("path", "call"), CALLS, ids=[path for path, _ in CALLS])
def test_silent_server_raises_no_answer_in_time(
    server: BrokenServer, path: str, call: Callable[[Client], object]
) -> None:
    server.fall_silent(path)
    with (
        Client(server.url, timeout_s=SHORT_S) as client,
        pytest.raises(NoAnswer, match="did not answer within") as raised,
    ):
        call(client)
    assert isinstance(raised.value, errors.OutcomeUnknown)


@pytest.mark.parametrize(("silent", "let_go"), [(PAUSE, CONTINUE), (BEGIN, ABORT)])
def test_unanswered_pause_or_session_is_released(
    server: BrokenServer, silent: str, let_go: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the answer an id chosen by the server would be lost."""
    monkeypatch.setattr("sglang_inflight.client.async_client.UPDATE_S", SHORT_S)
    server.fall_silent(silent)
    with Client(server.url, timeout_s=SHORT_S) as client:
        block: Any = client.paused() if silent == PAUSE else client.session()
        with pytest.raises(NoAnswer), block:
            raise AssertionError("nothing was taken")
    assert server.arrivals == [STATUS, silent, let_go]


def test_silent_server_refuses_fleet_pause(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet
) -> None:
    beside.fall_silent(PAUSE, CONTINUE)
    with pytest.raises(FleetRefused) as refused, fleet.paused():
        raise AssertionError("not all are paused")
    report = refused.value.report
    assert (report.phase, report.uncertain) == ("pause", [beside.url])
    assert server.arrivals[-1] == CONTINUE


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
@pytest.mark.parametrize("turn", [1, -1], ids=["first", "last"])
def test_fleet_resumes_all_servers_at_once(
    server: BrokenServer, beside: BrokenServer, turn: int, error: type[Exception] | None
) -> None:
    """The silent server holds up no other server, whatever the order."""

    def leave() -> None:
        with Fleet([beside.url, server.url][::turn]) as fleet, fleet.paused():
            beside.fall_silent(CONTINUE)
            if error is not None:
                raise error

    with ThreadPoolExecutor() as threads:
        left = threads.submit(leave)
        beside.wait_for(CONTINUE)
        server.wait_for(CONTINUE)
        beside.speak()
        assert isinstance(left.exception(), error or type(None))


def test_lost_pause_of_one_in_fleet_is_reported(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet
) -> None:
    def hold() -> None:
        with fleet.paused():
            server.answers[CONTINUE] = (409, refusal(errors.Conflict))
            beside.fall_silent(CONTINUE)

    with pytest.raises(PauseLost) as lost:
        hold()
    report = lost.value.report
    assert (report.phase, report.uncertain) == ("resume", [beside.url])
    assert isinstance(report.failures[server.url], errors.Conflict)


def test_silence_at_commit_splits_fleet(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet
) -> None:
    beside.fall_silent(END)
    with pytest.raises(FleetSplit, match="may have failed") as split:
        fleet.update_from_disk("/x")
    report = split.value.report
    assert (report.phase, list(report.answers)) == ("commit", [server.url])
    assert report.uncertain == [beside.url]


@pytest.mark.parametrize("kind", [errors.OutcomeUnknown, errors.HalfDone, errors.RankSilent])
def test_commit_error_of_one_in_fleet_is_reported(
    server: BrokenServer, beside: BrokenServer, fleet: Fleet, kind: type[errors.InflightError]
) -> None:
    beside.answers[END] = (kind.status, refusal(kind))
    with pytest.raises(FleetSplit) as split:
        fleet.update_from_disk("/x")
    is_certain = kind is errors.RankSilent
    assert split.value.report.uncertain == ([] if is_certain else [beside.url])
    assert ("may be" in str(split.value)) is not is_certain


# ---- Ctrl-C ------------------------------------------------------------------------------


def interrupt_when(arrived: Callable[[], None]) -> threading.Thread:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        arrived()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_ctrl_c_ends_unanswered_pause(server: BrokenServer, beside: BrokenServer) -> None:
    beside.fall_silent(PAUSE)

    def both_have_arrived() -> None:
        server.wait_for(PAUSE)
        beside.wait_for(PAUSE)

    thread = interrupt_when(both_have_arrived)
    with (
        Fleet([server.url, beside.url]) as fleet,
        pytest.raises(KeyboardInterrupt),
        fleet.paused(),
    ):
        raise AssertionError("not all are paused")
    thread.join()
    # the silent server may be paused, so it is released too
    assert server.arrivals[-1] == beside.arrivals[-1] == CONTINUE


def test_ctrl_c_ends_unanswered_commit(
    server: BrokenServer,
    beside: BrokenServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other commits finish first, and the log names the server without an answer."""
    monkeypatch.setattr("sglang_inflight.client.async_fleet.INTERRUPTED_S", SHORT_S)
    beside.fall_silent(END)
    thread = interrupt_when(lambda: beside.wait_for(END))
    with Fleet([server.url, beside.url]) as fleet, pytest.raises(KeyboardInterrupt):
        fleet.update_from_disk("/x")
    thread.join()
    assert f"{beside.url} may have failed" in caplog.text
    assert f"done on {server.url}" in caplog.text
