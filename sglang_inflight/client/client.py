"""One server, as a trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from sglang_inflight.client.renewal import Renewal
from sglang_inflight.errors import Conflict, RankSilent, Refused

Answer = dict[str, Any]

# A pause waits for a step, an update for its staging: the server bounds both.
TIMEOUT = httpx.Timeout(10.0, read=None)
_ERRORS: dict[int, type[Refused]] = {409: Conflict, 504: RankSilent}


class Client:
    """Calls of one server. Safe to use from several threads.

    Each method raises ``Refused``, ``Conflict`` (409) or ``RankSilent`` (504) with the
    server's sentence where it refused, and ``httpx.HTTPError`` where it was not reached or
    answered something else. Nothing is tried again: after an error on the way, an update
    may have happened or not, and ``status()`` tells.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def status(self) -> Answer:
        """State, holders, versions and staging, and the same of each rank."""
        return self._call("GET", "/inflight/status")

    def pause(
        self,
        mode: str | None = None,
        *,
        pause_id: str | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Pause generation, or renew the pause ``pause_id``; see ``paused`` first."""
        return self._post(
            "/pause_generation",
            mode=mode,
            pause_id=pause_id,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )

    def resume(self, pause_id: str | None = None) -> Answer:
        """Let go of one pause, or of all."""
        return self._post("/continue_generation", pause_id=pause_id)

    @contextmanager
    def paused(
        self, mode: str = "in_place", *, lease_s: float = 30.0, timeout_s: float | None = None
    ) -> Iterator[Answer]:
        """Paused for the time of the block, and no longer than that.

        The pause is renewed in the background. Where this process dies, or the network
        does, the lease runs out and the server generates again. Raises ``Conflict`` at the
        end of the block where the pause was lost meanwhile.
        """
        answer = self.pause(mode, lease_s=lease_s, timeout_s=timeout_s)
        pause_id: str = answer["pause_id"]
        try:
            with Renewal(lambda: self.pause(pause_id=pause_id, lease_s=lease_s), lease_s / 3):
                yield answer
        except BaseException:
            # an answer is not looked at: what is being raised tells more, and a server that
            # is not reached has the lease
            with suppress(httpx.HTTPError):
                self._http.post("/continue_generation", json={"pause_id": pause_id})
            raise
        self.resume(pause_id)

    def update_from_disk(
        self, model_path: str, *, weight_version: str | None = None, **fields: Any
    ) -> Answer:
        """Stage a checkpoint while the server generates, and commit it: the receipt.

        ``fields`` are those of the README's table; running requests keep their KV unless
        ``flush_cache`` or ``kv_cache`` says otherwise.
        """
        body = {"non_blocking": True, "flush_cache": False, **fields}
        return self._post(
            "/update_weights_from_disk",
            model_path=model_path,
            weight_version=weight_version,
            **body,
        )

    @contextmanager
    def session(
        self, *, weight_version: str | None = None, kv_cache: str = "fence", **fields: Any
    ) -> Iterator[Answer]:
        """Updates sent in the block go live together at its end.

        The yielded dict is the receipt, once the block has ended. Where the block raises,
        the session is dropped and nothing changed. ``fields`` are those of
        ``/begin_weight_update``; ``lease_s`` lets the server drop it by itself.
        """
        self._post("/begin_weight_update", non_blocking=True, **fields)
        receipt: Answer = {}
        try:
            yield receipt
        except BaseException:
            with suppress(httpx.HTTPError):
                self._http.post("/abort_weight_update", json={})
            raise
        receipt |= self._post(
            "/end_weight_update",
            non_blocking=True,
            weight_version=weight_version,
            kv_cache=kv_cache,
        )

    def roll_back(self, *, weight_version: str | None = None) -> Answer:
        """Return to the version before the last commit."""
        return self._post("/inflight/rollback", weight_version=weight_version)

    def _post(self, path: str, **body: Any) -> Answer:
        given = {name: value for name, value in body.items() if value is not None}
        return self._call("POST", path, given)

    def _call(self, method: str, path: str, body: Answer | None = None) -> Answer:
        response = self._http.request(method, path, json=body)
        if response.status_code in (400, *_ERRORS):
            raise _ERRORS.get(response.status_code, Refused)(_read_message(response))
        response.raise_for_status()
        answer: Answer = response.json()
        return answer


def _read_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text
