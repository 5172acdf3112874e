"""An imaginary device: its streams only record the order of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# names of work ordered before some point
Work = frozenset[str]


class Event:
    """The work certain to be done at a point of a stream."""

    def __init__(self, done: Work = frozenset(), *, enable_timing: bool = False) -> None:
        self.done = done
        self._has_time = enable_timing
        # time in ms, set by a test when the device reaches the event
        self.at: float | None = None
        self.was_waited_for = False

    def record(self, stream: Stream) -> None:
        self.done = stream.certain

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.was_waited_for = True

    def elapsed_time(self, end: Event) -> float:
        assert self._has_time
        assert end._has_time
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


class Stream:
    """A stream: its own work is ordered; work on other streams is ordered only by waits."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.certain: Work = frozenset()
        # work the host has waited for
        self.synchronized: Work | None = None

    def record_event(self) -> Event:
        return Event(self.certain)

    def wait_event(self, event: Event) -> None:
        self.certain |= event.done

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.synchronized = self.certain


# in the class below, the name Stream is a method
_Stream = Stream


class Device:
    """A stand-in for ``torch.cuda``. Streams come from a pool of ``pool``, reused in turn."""

    def __init__(self, pool: int = 32) -> None:
        self._pool = [Stream(handle) for handle in range(pool)]
        self._drawn = 0
        self._current = _Stream(-1)
        self._before: dict[str, Work] = {}

    Event = Event

    def Stream(self, priority: int = 0) -> _Stream:
        self._drawn += 1
        return self._pool[(self._drawn - 1) % len(self._pool)]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def current_stream(self) -> _Stream:
        return self._current

    def launch(self, name: str) -> None:
        """Put work on the current stream."""
        self._before[name] = self._current.certain
        self._current.certain |= {name}

    def is_ordered(self, first: str, then: str) -> bool:
        """Tell whether ``then`` cannot begin before ``first`` is done."""
        return first in self._before[then]
