"""The trail of a request: all that decides its numbers besides prompt and weights.

A position is a number of tokens of prompt and output that launched forwards have computed. Under
overlap scheduling it is known at a launch, before the result. A trail's events, in their order:

    ["prefill", begin, end]       a forward computed positions begin to end - 1, on KV before begin
    ["retract", position, prefix] the request lost its KV
    ["commit", position, epoch]   other weights came

Decoding steps are not written down: they follow from the tokens. Epochs have names and digests in
``weights``. ``prefix`` has version, epoch and end of each run of KV that the request had found in
the cache; for the last prefill ``kv_versions`` has it.

Only the scheduler's thread runs this module.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_inflight.extensions.trails import RECORD, REPLAY
from sglang_inflight.extensions.trails.fingerprint import fingerprint
from sglang_inflight.extensions.trails.prompts import digest_of
from sglang_inflight.hooking import AFTER, BEFORE, REQ, SCHEDULER, hook
from sglang_inflight.scheduler.controller import COMMITS, ENTRIES, PARTS, Controller
from sglang_inflight.scheduler.outputs import OUTPUTS
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.slots import RELEASES
from sglang_inflight.scheduler.versions.token_versions import pinned_label
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

# sampling parameters that decide tokens, by the API's names
_DECIDING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
)
_NORMALIZED = {"stop": "stop_strs", "stop_regex": "stop_regex_strs"}


@dataclass(slots=True)
class Trail:
    """Events of one request, and its position."""

    is_wanted: bool = False
    events: list[list[Any]] = field(default_factory=list)
    # the position: 0 while the request has no KV
    computed: int = 0
    # number of retractions so far
    retractions: int = 0
    # weights of the first forward
    first: VersionLabel | None = None
    # number of positions found in the cache, and what their slots told before they were freed
    cached: int = 0
    prefix: list[tuple[str, int, int]] = field(default_factory=list)

    def launch(self, begin: int, end: int, *, is_prefill: bool) -> None:
        if is_prefill:
            if not self.computed:
                self.cached = begin
            self.events.append(["prefill", begin, end])
        self.computed = end

    def retract(self, kept: int) -> None:
        """Note a retraction. ``kept``: the position behind the last forward whose token was kept.

        For want of memory SGLang retracts requests whose last forward still runs, and throws its
        token away. What came behind ``kept`` then changed no token.
        """
        # a request without a forward has nothing to lose
        if not self.computed:
            return
        position = min(self.computed, kept)
        for event in reversed(self.events):
            if event[0] != "commit":
                break
            event[1] = min(event[1], position)
        self.events.append(["retract", position, self.prefix])
        self.computed, self.prefix = 0, []
        self.retractions += 1

    def commit(self, epoch: int) -> None:
        if self.events:
            self.events.append(["commit", self.computed, epoch])

    def end(self, last: int) -> None:
        """Leave out commits that came behind the launch of the last token's forward.

        That forward ends at position ``last``.
        """
        while self.events and self.events[-1][0] == "commit" and self.events[-1][1] >= last:
            del self.events[-1]


class Trails:
    """The trails of one scheduler's requests, and the weights that they name."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._server = fingerprint(controller.scheduler)
        # requests with a trail, and some that have ended
        self.reqs: weakref.WeakSet[Req] = weakref.WeakSet()
        # version and digest by epoch, since the oldest epoch of a trail
        self._weights: dict[int, list[str | None]] = {}

    def admit(self, req: Req) -> None:
        if custom_param(req.sampling_params, RECORD) is None or req in self.reqs:
            return
        if not self.reqs:
            self._weights.clear()
        trail_of(req).is_wanted = True
        self.reqs.add(req)
        self._note_weights()

    def _note_weights(self) -> None:
        label = self._controller.versions.label
        self._weights[label.epoch] = [label.version, self._controller.live.digest]

    @hook(
        f"{SCHEDULER}.run_batch",
        BEFORE,
        order=2,
        via=lambda scheduler: scheduler.inflight.part(Trails),
    )
    def follow_launch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> None:
        if not self.reqs:
            return
        label = self._controller.versions.label
        is_extend = batch.forward_mode.is_extend()
        decoding = set(batch.decoding_reqs or ())
        for row, (req, end) in enumerate(zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)):
            trail = trail_of(req)
            if not trail.is_wanted:
                continue
            if trail.first is None:
                trail.first = pinned_label(req.weight_version_events) or label
            begin = batch.prefix_lens[row] if is_extend else end - 1
            trail.launch(begin, end, is_prefill=is_extend and req not in decoding)

    def read_prefix(self, req: Req) -> None:
        """Read which versions made the KV that a retracted request had found in the cache."""
        trail = trail_of(req)
        if not trail.is_wanted or not trail.cached or req.finished():
            return
        spans = self._controller.kv_versions.read(req, self._controller.versions.label) or []
        trail.prefix = [
            (span["version"], span["epoch"], min(span["end"], trail.cached))
            for span in spans
            if span["start"] < trail.cached
        ]

    def follow_commit(self) -> None:
        if self.reqs:
            self._note_weights()
        for req in self.reqs:
            # a request with a pinned version keeps its weights
            if not req.finished() and record_of(req).weights is None:
                trail_of(req).commit(self._controller.versions.epoch)

    def describe(self, req: Req) -> dict[str, Any] | None:
        """Return what a repetition of a finished request needs, besides the prompt's tokens."""
        trail = trail_of(req)
        first = trail.first
        if not trail.is_wanted or first is None:
            return None
        trail.end(_position_of_last_token(req))
        epochs = [event[2] for event in trail.events if event[0] == "commit"]
        adapter = self._controller.adapter_versions.of(req)
        return {
            "prompt": digest_of(req.origin_input_ids),
            "sampling": deciding(req.sampling_params),
            "adapter": adapter and adapter.adapter,
            "epoch": first.epoch,
            "events": trail.events,
            "weights": {
                str(first.epoch): self._weights.get(first.epoch, [first.version, None]),
                **{str(epoch): self._weights[epoch] for epoch in epochs},
            },
            "server": self._server,
        }


def _position_of_last_token(req: Req) -> int:
    """Return the position at which the forward ends that has made the last token."""
    return len(req.origin_input_ids) + len(req.output_ids) - 1


def trail_of(req: Req) -> Trail:
    return record_of(req).part(Trail)


def deciding(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that decide tokens, and have other values than SGLang's defaults."""
    default = type(params)()
    found = {
        name: value
        for name in _DECIDING
        if (value := getattr(params, name)) != getattr(default, name)
    }
    found |= {name: value for name, at in _NORMALIZED.items() if (value := getattr(params, at))}
    if "stop_token_ids" in found:
        found["stop_token_ids"] = sorted(found["stop_token_ids"])
    if params.sampling_seed is not None:
        found["sampling_seed"] = params.sampling_seed
    return found


@PARTS.join(order=1)
def make_trails(controller: Controller) -> Trails:
    return Trails(controller)


@ENTRIES.join(order=4)
def admit(controller: Controller, req: Req) -> None:
    controller.part(Trails).admit(req)


@COMMITS.join(order=3)
def follow_commit(controller: Controller) -> None:
    controller.part(Trails).follow_commit()


@RELEASES.join(order=1)
def read_prefix(controller: Controller, req: Req) -> None:
    controller.part(Trails).read_prefix(req)


@hook(f"{REQ}.reset_for_retract", AFTER, order=2)
def follow_retraction(_: None, req: Req) -> None:
    trail_of(req).retract(_position_of_last_token(req))


@OUTPUTS.join(order=2)
def describe(controller: Controller, reqs: list[Req]) -> dict[str, list[Any]]:
    trails = controller.part(Trails)
    return {REPLAY: [trails.describe(req) if req.finished() else None for req in reqs]}
