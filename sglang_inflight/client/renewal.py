"""Something with a lease, renewed in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import httpx

from sglang_inflight.errors import Refused

logger = logging.getLogger(__name__)


class Renewal:
    """Calls ``renew`` every ``period_s`` seconds until the block ends.

    A thread of its own, which ends before the block's ``with`` does. It stops renewing
    when it is refused, because then there is nothing left to renew; it tries again after
    an error on the way, while the lease may still hold.
    """

    def __init__(self, renew: Callable[[], object], period_s: float) -> None:
        self._renew = renew
        self._period_s = period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-renewal", daemon=True)

    def __enter__(self) -> Renewal:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            try:
                self._renew()
            except Refused as error:
                if not self._over.is_set():
                    logger.warning("The lease is lost: %s", error)
                return
            except httpx.HTTPError as error:
                logger.warning("The lease was not renewed, trying again: %s", error)
