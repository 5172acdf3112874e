"""Differences between the supported versions of SGLang, on minimal stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_inflight.scheduler import by_version


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[object, object]] = []

    def send_output(self, output: object, recv_obj: object = None) -> None:
        self.sent.append((output, recv_obj))


class Channels:
    def __init__(self) -> None:
        self.send_to_tokenizer = Sender()


class Older:
    """The scheduler of 0.5.22."""

    def __init__(self) -> None:
        self._engine_paused = False
        self.ipc_channels = Channels()

    def pause(self) -> None:
        self._engine_paused = True

    @property
    def sent(self) -> list[tuple[object, object]]:
        return self.ipc_channels.send_to_tokenizer.sent


class Newer(Older):
    """The scheduler of 0.5.23: outputs may go elsewhere, and a pause has a start time."""

    def __init__(self) -> None:
        super().__init__()
        self._pause_started_at: float | None = None
        self.elsewhere = Sender()

    def pause(self) -> None:
        super().pause()
        self._pause_started_at = 1.0

    def send_control_output(self, output: object, recv_req: object) -> None:
        self.elsewhere.send_output(output, recv_req)

    @property
    def sent(self) -> list[tuple[object, object]]:
        return self.elsewhere.sent


@pytest.fixture(params=[Older, Newer])
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(by_version, "IS_0_5_22", request.param is Older)
    return request.param()


def test_pause_within_block_is_undone(scheduler: Any) -> None:
    before = dict(vars(scheduler))
    with by_version.paused_as_it_was(scheduler):
        scheduler.pause()
    assert vars(scheduler) == before


def test_earlier_pause_outlasts_block(scheduler: Any) -> None:
    scheduler.pause()
    before = dict(vars(scheduler))
    with by_version.paused_as_it_was(scheduler):
        scheduler._engine_paused = False
    assert vars(scheduler) == before


def test_control_output_uses_sglangs_channel(scheduler: Any) -> None:
    by_version.send_control_output(scheduler, "output", "request")
    assert scheduler.sent == [("output", "request")]
