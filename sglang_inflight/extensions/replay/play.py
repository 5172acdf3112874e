"""Makes a rollout again on a server: the same forwards, with the same commits between them.

A repetition runs alone on its server. Its script (``script.py``) gives it the recorded prefills,
and pauses the server at each recorded commit and retraction. The client then brings the weights of
the next version, or retracts, and lets generation continue. Commits keep all KV, because the
script says what the request's prefills may find, and retractions are made by themselves.

KV that the rollout had found in the cache is computed first, by the versions that had made it. KV
of another request, found after a retraction, is computed by the repetition itself, in a prefill of
its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from sglang_inflight.client import Client, Receipt
from sglang_inflight.client.async_client import LIMITS
from sglang_inflight.client.spans import Span, read_spans
from sglang_inflight.extensions.replay import EXTENSION, PAUSE_ID, SCRIPT, SETTING
from sglang_inflight.extensions.replay.rollout import Event, Record, Rollout, rows_of
from sglang_inflight.vocabulary.errors import Refused

_POLL_S = 0.01
_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Stop:
    """Events of a trail at one place, and where the request must pause for them."""

    retractions: int
    position: int
    events: list[Event]
    # whether the request is prefilled again, and finds nothing in the cache
    forgets: bool = False


@dataclass(frozen=True)
class Played:
    """A repetition."""

    tokens: list[int]
    logprobs: list[float]
    made_by: list[Span]
    kv: list[Span]
    events: list[Event]
    rows: dict[str, str]
    # what was not as recorded, in sentences
    notes: list[str]


def stops(events: Sequence[Event], added: Mapping[int, int]) -> list[Stop]:
    """Return the places at which a repetition pauses, in their order.

    ``added``: see ``added_prefills``.
    """
    found: list[Stop] = []
    retractions, was_retracted = 0, False
    for at, event in enumerate(events):
        kind, position = event[:2]
        if kind == "prefill":
            if found and was_retracted:
                found[-1] = replace(found[-1], forgets=event[1] == 0 or at in added)
            was_retracted = False
            continue
        was_retracted |= kind == "retract"
        last = found[-1] if found else None
        # a request in the queue makes no step: what happens then happens at the last pause
        waits = kind == "commit" and position == 0
        if last is not None and (
            waits or (last.retractions, last.position) == (retractions, position)
        ):
            last.events.append(event)
        else:
            found.append(Stop(retractions, position, [event]))
        retractions += kind == "retract"
    return found


def prefills(events: Sequence[Event], added: Mapping[int, int]) -> list[list[int]]:
    found = []
    for at, event in enumerate(events):
        if at in added:
            found.append([0, added[at]])
        if event[0] == "prefill":
            found.append(list(event[1:3]))
    return found


def added_prefills(rollout: Rollout) -> dict[int, int]:
    """Return the ends of prefills that a repetition makes more, by the event that follows.

    A retracted request may find KV that another request has made meanwhile. The repetition runs
    alone, and finds its own older KV there, if any. So it makes such KV by itself. Raises
    ``Refused`` for KV that other weights have made than those in place.
    """
    record = rollout.record
    served = record.version(record.epoch)
    # versions of the positions with KV, and of those before the last retraction
    kv: list[str] = []
    own: list[str] | None = None
    found: dict[int, int] = {}
    for at, event in enumerate(record.events):
        kind, position = event[:2]
        if kind == "prefill":
            if not kv:
                kv = found_in_cache(rollout, at)[:position]
            if own is not None and kv != own[:position]:
                if {*kv} != {served}:
                    raise Refused(
                        f"{rollout.name} found KV of another request after a retraction, which "
                        f"{', '.join(sorted({*kv}))} had made, while {served} was served"
                    )
                found[at] = position
            kv, own = kv[:position] + [served] * (event[2] - position), None
            continue
        kv = kv[:position] + [served] * (position - len(kv))
        if kind == "retract":
            own, kv = kv, []
        else:
            served = record.version(event[2])
    return found


def found_in_cache(rollout: Rollout, at: int) -> list[str]:
    """Return the versions of the KV before the prefill at event ``at``, and perhaps behind it."""
    for event in rollout.record.events[at:]:
        if event[0] == "retract":
            ends = [(version, end) for version, _, end in event[2]]
            break
    else:
        ends = [(span.version, span.end) for span in rollout.kv]
    found: list[str] = []
    for version, end in ends:
        found += [version] * (end - len(found))
    return found


def without_added(
    events: Sequence[Event], recorded: Sequence[Event], added: Mapping[int, int]
) -> list[Event]:
    """Return a repetition's events without the prefills that were added."""
    is_added = []
    for at, event in enumerate(recorded):
        is_added += [True] * (at in added) + [False] * (event[0] == "prefill")
    places = iter(is_added)
    return [event for event in events if event[0] != "prefill" or not next(places, False)]


class Stage:
    """A server on which rollouts are repeated, one after the other. Not for several threads."""

    def __init__(
        self, url: str, checkpoints: Mapping[str, str], *, api_key: str | None = None
    ) -> None:
        """``checkpoints``: folders on the server, by version."""
        self._url = url
        self._checkpoints = checkpoints
        self._client = Client(url, api_key=api_key)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_PATIENCE_S, limits=LIMITS)
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._http.close()
        self._client.close()

    def require(self, versions: Sequence[str]) -> None:
        """Raise ``Refused`` if a version has no checkpoint, or the server takes no scripts."""
        for version in versions:
            checkpoint_of(self._checkpoints, version)
        if EXTENSION.name not in self._client.status().extensions:
            raise Refused(f"{self._url} takes no replays: start it with {SETTING}=1")

    def play(self, rollout: Rollout, *, forces: bool) -> Played:
        """Make ``rollout`` again. ``forces``: emit its tokens, whatever would be sampled."""
        record = rollout.record
        first = record.version(record.epoch)
        notes = self._fill_cache(rollout, first)
        added = added_prefills(rollout)
        todo = stops(record.events, added)
        script = {
            "prefills": prefills(record.events, added),
            "pauses": [[stop.retractions, stop.position] for stop in todo],
        }
        custom: dict[str, Any] = {"record": "replay", SCRIPT: script}
        name = uuid.uuid4().hex
        asked = self._threads.submit(self._generate, rollout, custom, forces=forces, name=name)
        try:
            for stop in todo:
                if not self._wait_for_pause(asked):
                    # it may have come with the request's end
                    self._client.resume()
                    break
                for event in stop.events:
                    notes += self._repeat(event, record)
                if stop.forgets:
                    self._forget_prefixes()
                self._client.resume()
        except BaseException:
            # the request would wait in its pause, and its thread for the request
            self._http.post("/abort_request", json={"rid": name})
            self._client.resume()
            raise
        played = self._played(asked.result(), notes)
        return replace(played, events=without_added(played.events, record.events, added))

    def under(self, rollout: Rollout, version: str) -> Played:
        """Return the rollout's tokens, with log probabilities by ``version`` alone."""
        self._serve(version, kv_cache="recompute")
        custom = {"record": "replay"}
        answer = self._generate(rollout, custom, forces=True, name=uuid.uuid4().hex)
        return self._played(answer, [])

    # ---- steps -----------------------------------------------------------------------

    def _fill_cache(self, rollout: Rollout, first: str) -> list[str]:
        """Serve the rollout's first version, over a cache with what the rollout had found."""
        prefix = rollout.prefix
        begins_with = prefix[0][0] if prefix else first
        receipt = self._serve(begins_with, kv_cache="recompute")
        for version, _, end in prefix:
            if version != begins_with:
                receipt = self._serve(version, kv_cache="keep")
            begins_with = version
            self._post(
                {
                    "input_ids": rollout.prompt[:end],
                    "sampling_params": {"max_new_tokens": 1},
                    **adapter_of(rollout),
                }
            )
        if begins_with != first:
            receipt = self._serve(first, kv_cache="keep")
        return self._compare_digest(receipt, rollout.record, rollout.record.epoch)

    def _repeat(self, event: Event, record: Record) -> list[str]:
        if event[0] == "retract":
            self._client.pause("retract", lease_s=_PATIENCE_S)
            return []
        receipt = self._serve(record.version(event[2]), kv_cache="keep")
        return self._compare_digest(receipt, record, event[2])

    def _forget_prefixes(self) -> None:
        """Empty the cache. SGLang would put cached KV of the same tokens in the place of new KV."""
        reply = self._http.post("/flush_cache")
        if reply.status_code != 200:
            raise Refused(f"{self._url} did not flush its cache: {reply.text[:1000]}")

    def _serve(self, version: str, *, kv_cache: str) -> Receipt:
        fields: dict[str, Any] = {"kv_cache": kv_cache}
        receipt = self._client.update_from_disk(
            checkpoint_of(self._checkpoints, version), weight_version=version, **fields
        )
        assert isinstance(receipt, Receipt)
        return receipt

    @staticmethod
    def _compare_digest(receipt: Receipt, record: Record, epoch: int) -> list[str]:
        version, digest = record.weights[str(epoch)]
        ours = receipt.ranks[0].digest
        if digest is None or digest == ours:
            return []
        return [f"version {version!r} had other weights: digest {digest}, and {ours} here"]

    def _wait_for_pause(self, asked: Future[Any]) -> bool:
        """Return whether the request's pause came; False if the request has ended."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if asked.done():
                return False
            if any(holder.pause_id == PAUSE_ID for holder in self._client.status().holders):
                return True
            time.sleep(_POLL_S)
        raise Refused(f"the server has neither paused nor ended the request in {_PATIENCE_S:g} s")

    def _generate(
        self, rollout: Rollout, custom: dict[str, Any], *, forces: bool, name: str
    ) -> Any:
        sampling = rollout.record.sampling
        if forces:
            custom = {**custom, "forced_token_ids": rollout.tokens}
        return self._post(
            {
                "rid": name,
                "input_ids": rollout.prompt,
                "sampling_params": {
                    **sampling,
                    "max_new_tokens": len(rollout.tokens),
                    "custom_params": custom,
                },
                "return_logprob": True,
                **{f"return_{name}": True for name in rollout.rows},
                **adapter_of(rollout),
            }
        )

    def _post(self, body: Any) -> Any:
        reply = self._http.post("/generate", json=body)
        if reply.status_code != 200:
            raise Refused(f"{self._url} refused the request: {reply.text[:1000]}")
        return reply.json()

    @staticmethod
    def _played(answer: Any, notes: list[str]) -> Played:
        meta = answer["meta_info"]
        return Played(
            answer["output_ids"],
            [logprob for logprob, *_ in meta["output_token_logprobs"]],
            read_spans(meta),
            read_spans(meta, "kv_versions"),
            meta["replay"]["events"],
            rows_of(meta),
            notes,
        )


def adapter_of(rollout: Rollout) -> dict[str, str]:
    """Return the fields of a request that choose the rollout's adapter."""
    adapter = rollout.record.adapter
    return {} if adapter is None else {"lora_path": adapter}


def checkpoint_of(checkpoints: Mapping[str, str], version: str) -> str:
    """Return the folder of ``version``. Raises ``Refused`` if there is none."""
    if version not in checkpoints:
        raise Refused(f"no checkpoint for version {version!r}: --checkpoint {version}=PATH")
    return checkpoints[version]
