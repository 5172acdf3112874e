"""A device that is not there: streams that only note what was put on them, and after what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# what was done, by name, so that an order between streams can be asked for
Work = frozenset[str]


class Event:
    """All that was certain to be done at one point of a stream."""

    def __init__(self, done: Work = frozenset(), *, enable_timing: bool = False) -> None:
        self.done = done
        self._has_time = enable_timing
        # a test says when the device comes to it, in ms
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
    """Work on one stream comes one after the other; on two only what a wait orders does."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.certain: Work = frozenset()
        # what the host waited for
        self.synchronized: Work | None = None

    def record_event(self) -> Event:
        return Event(self.certain)

    def wait_event(self, event: Event) -> None:
        self.certain |= event.done

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.synchronized = self.certain


# within the class below its name is a method's
_Stream = Stream


class Device:
    """Stands in for ``torch.cuda``. Streams come out of a pool of ``pool``, over and over."""

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
        """Whether ``then`` cannot begin before ``first`` is done."""
        return first in self._before[then]
