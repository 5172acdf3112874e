"""Makes rollouts on a fleet, each of which outlives its server.

    the server …                          the rollout …
    dies, or its stream breaks            goes on elsewhere, from the tokens that have come
    drains (``finish_reason`` ``abort``)  goes on elsewhere, from all its tokens
    refuses with 503                      is sent to another server; after all, again
    refuses with another 4xx              is refused
    is the third in a row that dies       is lost: it may be what they die of

A rollout is a stream from its server, also for a caller who waits for the whole answer: the tokens
of a dead server would be lost otherwise. Its next server gets them as ``output_so_far``, and its
answer is the whole one. A request whose records no other server has (``return_sampling_mask``,
``return_hidden_states``, a record for a replay) begins anew, unless its caller has tokens of it.

Everything runs on the event loop of the fleet's first use.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import httpx

from sglang_inflight.client.aio import together
from sglang_inflight.client.answers import Json, read_json, read_reply, say_why
from sglang_inflight.client.async_client import AsyncClient
from sglang_inflight.client.rollouts.output import Output
from sglang_inflight.client.rollouts.servers import LONG_ANSWER_S, LOOK_S, Place, Servers
from sglang_inflight.client.rollouts.watching import End, Move, Watcher, Why
from sglang_inflight.vocabulary.errors import NotServed, OutcomeUnknown, Refused

logger = logging.getLogger(__name__)

# longest time without a server for a rollout
PATIENCE_S = 600.0
# servers in a row that may fail with a rollout before they have made a token of it
_MOST_FAILURES = 3
_BUSY = 503
# fields of a batch with a value for each prompt
_PER_PROMPT = (
    "rid",
    "sampling_params",
    "lora_path",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
)
_DATA, _END = "data: ", "data: [DONE]"
_STREAM = "text/event-stream"


class RolloutLost(OutcomeUnknown):
    """A rollout could not go on: no server took it in time, or none can go on with it."""


class _Moves(Exception):
    """The rollout leaves its server, which goes on."""

    why: ClassVar[Why] = "drained"


class _Busy(_Moves):
    """The server refuses the request now, and another one may take it."""

    why = "busy"


class _Dead(_Moves):
    """The server cannot be reached."""

    why = "unreachable"


class _Failed(_Moves):
    """The server failed, or died, while it had the request."""

    why = "failed"


@dataclass(frozen=True)
class _Left:
    """A rollout without a server: what it left, with how many tokens, and when."""

    source: str
    moves: _Moves
    tokens: int
    at: float

    def end(self, target: str, now: float) -> Move:
        why, said = self.moves.why, str(self.moves)
        return Move(self.source, target, why, said, self.tokens, now - self.at)


class Rollout(Protocol):
    """One rollout, in the form of one route."""

    path: str

    @property
    def prompt(self) -> Sequence[int] | None:
        """The prompt's tokens, if they are known."""

    @property
    def tokens(self) -> Sequence[int]:
        """The output's tokens so far, of all servers."""

    @property
    def finish_reason(self) -> str | None:
        """Why the output ended; None before its end."""

    @property
    def has_contract(self) -> bool:
        """Whether the request says which weights it takes."""

    def wanted_versions(self) -> Collection[str]:
        """Return the versions that the next server should serve."""

    def next_body(self) -> Json:
        """Return the next server's request for a stream."""

    def take(self, chunk: Json, server: str) -> bool:
        """Take a chunk. Returns whether it has something new."""

    def answer(self, server: str) -> Json:
        """Return what the caller gets after a chunk."""

    def why_not_movable(self) -> str | None:
        """Return why no other server can go on from here, or None."""

    def move(self, server: str, why: str) -> None:
        """Note that ``server`` makes no further token."""

    def restart(self) -> None:
        """Drop what the rollout has."""


class Rollouts:
    """Rollouts on the servers of one fleet."""

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        left_out: Callable[[], Collection[str]],
        *,
        patience_s: float = PATIENCE_S,
        watcher: Watcher | None = None,
    ) -> None:
        """``left_out`` returns the URLs of servers that take no rollouts now."""
        self.servers = Servers(clients)
        self._left_out = left_out
        self._patience_s = patience_s
        self._watcher = watcher or Watcher()

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """Return the answer to a body of ``/generate``; a list for samples and batches."""
        parts = split(body)
        if parts is None:
            async with aclosing(self.run(Output(body), streams=False)) as answers:
                return await anext(answers)
        found: list[Any] = [None] * len(parts)

        async def make(place: int, part: Json) -> None:
            found[place] = await self.generate(part)

        await together(make(place, part) for place, part in enumerate(parts))
        return found

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json]:
        """Yield the answer as it grows, each time from its first token on.

        The answers of samples and batches have an ``index``.
        """
        parts = split(body)
        if parts is None:
            async with aclosing(self.run(Output(body), streams=True)) as answers:
                async for answer in answers:
                    yield answer
            return
        queue: asyncio.Queue[Json | None] = asyncio.Queue()

        async def fill(index: int, part: Json) -> None:
            async with aclosing(self.run(Output(part), streams=True)) as answers:
                async for answer in answers:
                    queue.put_nowait({**answer, "index": index})

        async def fill_all() -> None:
            try:
                await together(fill(index, part) for index, part in enumerate(parts))
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(fill_all())
        try:
            while (grown := await queue.get()) is not None:
                yield grown
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def run(self, rollout: Rollout, *, streams: bool) -> AsyncGenerator[Json]:
        """Yield one rollout's answer as it grows. ``streams``: the caller keeps what is yielded."""
        how: End = "lost"
        self._watcher.begins()
        try:
            async with aclosing(self._run(rollout, streams=streams)) as answers:
                async for answer in answers:
                    yield answer
            how = "whole"
        except Refused:
            how = "refused"
            raise
        except (GeneratorExit, asyncio.CancelledError):
            # a caller of the whole answer asks for nothing behind it
            how = "left" if rollout.finish_reason is None else "whole"
            raise
        finally:
            self._watcher.ends(how)

    async def _run(self, rollout: Rollout, *, streams: bool) -> AsyncGenerator[Json]:
        clock = asyncio.get_running_loop().time
        failures = 0
        busy: set[str] = set()
        refused: set[str] = set()
        left: _Left | None = None
        while True:
            before = len(rollout.tokens)
            place = await self._find(rollout, busy)
            place.requests += 1
            instance = place.instance
            try:
                async with aclosing(self._chunks(place, rollout)) as chunks:
                    async for chunk in chunks:
                        is_new = rollout.take(chunk, place.url)
                        if await self._was_handed_back(rollout, place, instance):
                            raise _Moves("drained")
                        if is_new and left is not None:
                            self._watcher.moved(left.end(place.url, clock()))
                            left = None
                        if is_new and (streams or rollout.finish_reason is not None):
                            yield rollout.answer(place.url)
                if rollout.finish_reason is not None:
                    return
                raise _Failed("its stream broke off")
            except _Moves as moves:
                busy.add(place.url)
                self._leave(rollout, place, moves, streams=streams)
                if count := len(rollout.tokens):
                    left = left or _Left(place.url, moves, count, clock())
                else:
                    left = None
                if isinstance(moves, _Busy) and rollout.has_contract:
                    refused.add(place.url)
                    await place.look()
                    ready = self.servers.ready() - {*self._left_out()}
                    if ready and ready <= refused:
                        # each has waited for as long as the contract says
                        raise NotServed(str(moves)) from moves
                if isinstance(moves, _Failed):
                    # a request may be what its servers die of
                    failures = failures + 1 if len(rollout.tokens) <= before else 1
                    if failures == _MOST_FAILURES:
                        raise RolloutLost(
                            f"{failures} servers in a row failed with this rollout, and none made "
                            f"a token of it; the last was {place.url}: {moves}"
                        ) from moves
            finally:
                place.requests -= 1

    def _leave(self, rollout: Rollout, place: Place, moves: _Moves, *, streams: bool) -> None:
        why = str(moves)
        if isinstance(moves, _Dead | _Failed):
            # until the next look
            place.status, place.why_not = None, why
        lost = rollout.why_not_movable()
        count = len(rollout.tokens)
        logger.warning("A rollout leaves %s with %d tokens: %s", place.url, count, why)
        if lost is None:
            if count:
                rollout.move(place.url, why)
        elif streams:
            raise RolloutLost(f"{place.url}: {why}, and no other server can go on: {lost}")
        else:
            rollout.restart()

    async def _find(self, rollout: Rollout, busy: set[str]) -> Place:
        """Return a server for the rollout's next part, and wait for one if need be.

        ``busy``: servers that have just refused it, or left it. They are asked again after others.
        """
        give_up_at = asyncio.get_running_loop().time() + self._patience_s
        while True:
            place = await self.servers.find(
                rollout.prompt, rollout.wanted_versions(), busy | {*self._left_out()}
            )
            if place is not None:
                return place
            if asyncio.get_running_loop().time() > give_up_at:
                whys = ", ".join(f"{p.url}: {p.why_not}" for p in self.servers.places.values())
                raise RolloutLost(f"no server took the rollout in {self._patience_s:g} s ({whys})")
            busy.clear()
            await asyncio.sleep(LOOK_S)

    async def _was_handed_back(self, rollout: Rollout, place: Place, instance: str | None) -> bool:
        """Return whether the server ended the request because the server leaves.

        ``instance``: the server's process that began with the request. A server that has left may
        be back by now, at the same address.
        """
        if rollout.finish_reason != "abort":
            return False
        await place.look(LONG_ANSWER_S)
        return place.is_leaving or place.instance != instance

    async def _chunks(self, place: Place, rollout: Rollout) -> AsyncGenerator[Json]:
        """Yield the chunks of a request. Raises ``_Moves`` if another server is to make it."""
        try:
            async with place.client.streamed(rollout.path, rollout.next_body()) as response:
                if not response.is_success:
                    reply = await read_reply(response)
                    if response.status_code == _BUSY:
                        raise _Busy(say_why(reply))
                    if response.is_server_error:
                        raise _Failed(say_why(reply))
                    read_json(reply)
                if not response.headers.get("content-type", "").startswith(_STREAM):
                    yield read_json(await read_reply(response))
                    return
                async for line in response.aiter_lines():
                    if not line.startswith(_DATA) or line == _END:
                        continue
                    chunk = json.loads(line.removeprefix(_DATA))
                    if "error" in chunk:
                        raise _read_error(chunk["error"])
                    yield chunk
        except httpx.ConnectError as error:
            raise _Dead(f"{error or 'no connection'}") from error
        except httpx.TransportError as error:
            raise _Failed(f"{type(error).__name__} {error}".strip()) from error
        except json.JSONDecodeError as error:
            raise _Failed(f"it broke off amid a chunk: {error}") from error


def _read_error(error: Any) -> Exception:
    """Return what a stream's error means: a request that is refused, or that another may take."""
    code = error.get("code") if isinstance(error, dict) else None
    said = str(error.get("message") if isinstance(error, dict) else error)
    if isinstance(code, int) and code >= 500:
        return _Busy(said) if code == _BUSY else _Failed(said)
    return Refused(said)


def split(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return one body for each prompt and sample, or None for a body of one.

    Sample ``i`` of a prompt has the request's seed plus ``i``, as on one server.
    """
    field = "input_ids" if body.get("input_ids") is not None else "text"
    prompts = body.get(field)
    is_batch = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list | str)
    count = len(prompts) if is_batch and prompts is not None else 1
    parts: list[Json] = []
    for place in range(count):
        of_prompt = dict(body)
        if is_batch and prompts is not None:
            of_prompt[field] = prompts[place]
            for name in _PER_PROMPT:
                if isinstance(value := body.get(name), list):
                    of_prompt[name] = value[place]
        sampling = of_prompt.get("sampling_params") or {}
        for sample in range(sampling.get("n") or 1):
            params = {**sampling, "n": 1}
            if params.get("sampling_seed") is not None:
                params["sampling_seed"] += sample
            part = {**of_prompt, "sampling_params": params}
            if isinstance(rid := of_prompt.get("rid"), str):
                part["rid"] = f"{rid}_{len(parts)}"
            parts.append(part)
    is_one = len(parts) == 1 and not is_batch
    return None if is_one else parts
