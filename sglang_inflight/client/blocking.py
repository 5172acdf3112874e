"""Blocking clients of one server and of a fleet, for threads without an event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.async_fleet import AsyncFleet


class Closable(Protocol):
    async def aclose(self) -> None: ...


A = TypeVar("A", bound=Closable)
P = ParamSpec("P")
T = TypeVar("T")
ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

# one event loop in a thread of its own, while any client of this process is open
_LOOP = BlockingPortalProvider()


class Blocking(Generic[A]):
    """An async client with its calls on the shared loop. Safe to use from several threads.

    Ctrl-C cancels the call. The ``KeyboardInterrupt`` goes on after the call has cleaned up.
    """

    def __init__(self, client: A) -> None:
        self.client = client
        self.portal: BlockingPortal = _LOOP.__enter__()
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.portal.call(self.client.aclose)
            _LOOP.__exit__(None, None, None)


def waiting(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return a blocking version of ``method``."""

    @functools.wraps(method)
    def wait(blocking: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(method, blocking.client, *args, **kwargs)
        return _Task(blocking.portal, call).wait()

    return wait


def waiting_block(
    method: Callable[Concatenate[A, P], AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[Blocking[A], P], AbstractContextManager[T]]:
    """Return a version of ``method`` for ``with`` instead of ``async with``."""

    @functools.wraps(method)
    def block(
        blocking: Blocking[A], /, *args: P.args, **kwargs: P.kwargs
    ) -> AbstractContextManager[T]:
        return _Block(blocking.portal, method(blocking.client, *args, **kwargs))

    return block


class _Task(Generic[T]):
    """A coroutine on the loop, awaited by another thread."""

    def __init__(self, portal: BlockingPortal, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._over = threading.Event()
        self._future = portal.start_task_soon(self._run, call)

    async def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await call()
        finally:
            self._over.set()

    def wait(self) -> T:
        with self.cancelled_on_failure():
            return self._future.result()

    @contextmanager
    def cancelled_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._future.cancel()
            # cancel() finishes the future at once; the coroutine still has to clean up
            self._over.wait()
            raise


class _Block(AbstractContextManager[T]):
    """A block run by one task from entry to exit, so that an interruption is always cleaned up."""

    def __init__(self, portal: BlockingPortal, block: AbstractAsyncContextManager[T]) -> None:
        self._portal = portal
        self._block = block
        self._entered: Future[T] = Future()
        # arguments of __exit__
        self._left: Future[ExcInfo] = Future()

    def __enter__(self) -> T:
        self._task = _Task(self._portal, self._live)
        with self._task.cancelled_on_failure():
            return self._entered.result()

    def __exit__(self, *how: Any) -> bool | None:
        self._left.set_result(how)
        return self._task.wait()

    async def _live(self) -> bool | None:
        try:
            self._entered.set_result(await self._block.__aenter__())
        except BaseException as error:
            self._entered.set_exception(error)
            raise
        try:
            how = await asyncio.wrap_future(self._left)
        except asyncio.CancelledError as error:
            await self._block.__aexit__(type(error), error, error.__traceback__)
            raise
        # passed, not raised: a KeyboardInterrupt raised in a task would end the loop
        return await self._block.__aexit__(*how)


class Client(Blocking[AsyncClient]):
    """``AsyncClient`` without an event loop. Callbacks run in another thread."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a client. ``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``.

        ``timeout_s`` is the time limit of an answer (see ``AsyncClient``).
        """
        super().__init__(AsyncClient(url, api_key=api_key, timeout_s=timeout_s))

    status = waiting(AsyncClient.status)
    worker = waiting(AsyncClient.worker)
    loads = waiting(AsyncClient.loads)
    wait_for = waiting(AsyncClient.wait_for)
    pause = waiting(AsyncClient.pause)
    resume = waiting(AsyncClient.resume)
    paused = waiting_block(AsyncClient.paused)
    update = waiting(AsyncClient.update)
    update_from_disk = waiting(AsyncClient.update_from_disk)
    update_from_peer = waiting(AsyncClient.update_from_peer)
    session = waiting_block(AsyncClient.session)
    release_memory = waiting(AsyncClient.release_memory)
    resume_memory = waiting(AsyncClient.resume_memory)
    roll_back = waiting(AsyncClient.roll_back)
    save_served_weights = waiting(AsyncClient.save_served_weights)
    discard_saved_weights = waiting(AsyncClient.discard_saved_weights)
    offer_served_weights = waiting(AsyncClient.offer_served_weights)
    withdraw_served_weights = waiting(AsyncClient.withdraw_served_weights)
    expect_version = waiting(AsyncClient.expect_version)
    drain = waiting(AsyncClient.drain)
    why_not_ready = waiting(AsyncClient.why_not_ready)


class Fleet(Blocking[AsyncFleet]):
    """``AsyncFleet`` without an event loop. Callbacks run in another thread."""

    def __init__(
        self, urls: Iterable[str], *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a fleet. Raises ``ValueError`` for no URL, or for the same URL twice.

        ``timeout_s`` is the time limit of an answer (see ``AsyncClient``).
        """
        super().__init__(AsyncFleet(urls, api_key=api_key, timeout_s=timeout_s))

    @property
    def left_out(self) -> frozenset[str]:
        """URLs of the servers that take no part in updates, pauses and rollbacks."""
        return frozenset(self.client.left_out)

    def leave_out(self, urls: Iterable[str]) -> None:
        """Go on without some servers (``AsyncFleet.leave_out``)."""
        self.client.leave_out(urls)

    status = waiting(AsyncFleet.status)
    generate = waiting(AsyncFleet.generate)
    wait_for = waiting(AsyncFleet.wait_for)
    paused = waiting_block(AsyncFleet.paused)
    update = waiting(AsyncFleet.update)
    update_from_disk = waiting(AsyncFleet.update_from_disk)
    session = waiting_block(AsyncFleet.session)
    roll_back = waiting(AsyncFleet.roll_back)
    table = waiting(AsyncFleet.table)
    catch_up = waiting(AsyncFleet.catch_up)
