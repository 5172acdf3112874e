"""The update that has its turn: what its calls asked for, to be done at the commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_inflight.errors import Conflict
from sglang_inflight.frontend.bodies import DiskBody, UpdateBody
from sglang_inflight.messages import KVPolicy, OpenCall, SealCall, Selector


@dataclass
class OpenUpdate:
    """One call, or a session of many. Belongs to ``Updates`` and the front end's event loop."""

    id: str
    selector: Selector | None
    deadline: float  # time.monotonic()
    # called when the lease has run out
    expire: Callable[[OpenUpdate], None]
    weight_version: str | None = None
    kv_cache: KVPolicy | None = None
    torch_empty_cache: bool = False
    staged_s: float = 0.0
    tensors: int = 0
    bytes: int = 0
    model_path: str | None = None
    load_format: str | None = None
    is_committing: bool = False
    is_session: bool = False
    # whether the calls that brought tensors so far named the session; None before the first
    is_named: bool | None = None
    lease_s: float | None = None
    # once there is one, nothing more is staged
    vote: asyncio.Task[None] | None = None
    _lease: asyncio.TimerHandle | None = None

    @property
    def kv_policy(self) -> KVPolicy:
        """That of the commit, as far as its calls have said by now."""
        return self.kv_cache or "fence"

    def is_foreign(self, body: UpdateBody) -> bool:
        """Whether a call is no piece of this session, but an update of its own.

        Upstream's clients name no session, so theirs takes whatever comes. A caller who does
        name it is safe from others' calls, say one whose sender is long gone.
        """
        return body.session_id is None and self.is_named is True

    def claim(self, body: UpdateBody) -> None:
        """Raises ``Conflict`` where a call names the session, and one before it did not."""
        if body.session_id is not None and self.is_named is False:
            raise Conflict(
                "a call that did not name this session sent weights into it, and may be "
                "anybody's: the session is dropped"
            )
        self.is_named = body.session_id is not None

    def note(self, body: UpdateBody) -> None:
        """The last version named wins; a cache once to be recomputed is recomputed."""
        self.weight_version = body.weight_version or self.weight_version
        self.torch_empty_cache |= body.torch_empty_cache
        if self.kv_cache is None or body.kv_cache is not None or body.flush_cache:
            self.kv_cache = body.kv_policy
        if isinstance(body, DiskBody) and "draft" not in (body.selector, self.selector):
            self.model_path, self.load_format = body.model_path, body.load_format

    def renew_lease(self) -> None:
        """It runs out ``lease_s`` from now on; never where that is None."""
        self.end_lease()
        if self.lease_s is not None:
            self._lease = asyncio.get_running_loop().call_later(self.lease_s, self.expire, self)

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def seconds_left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def open_call(self, *, partial: bool, expected: str | None) -> OpenCall:
        return OpenCall(
            call_id="",
            update_id=self.id,
            selector=self.selector,
            partial=partial,
            expected_version=expected,
            timeout_s=self.seconds_left(),
        )

    def seal_call(self) -> SealCall:
        return SealCall(call_id="", update_id=self.id, timeout_s=self.seconds_left())
