"""Hands the versions of KV and first token from a prefill server to a decode server.

The prefill server writes a note beside a request's first token, before it sends the last of the KV.
The decode server reads the note when the transfer is committed to the request. It then labels the
first token and the prompt's KV with their versions. A prefix from the decode server's own cache
keeps its label.

The note is in the row sent by SGLang after the KV, in numbers left at 0 by SGLang. The checksum
includes the transfer's room, so another request's data in the row are no valid note.

Each server counts its own epochs. A label with a name and an epoch of this server counts as this
server's. Any other label is marked as the prefill server's.

Only the scheduler's thread runs this module. It writes before the row goes to the sending threads.
It reads when the receiving threads are done, on every rank in the same step.

The note has few bytes, to fit into SGLang's own protocol. There each request has a row of numbers,
sent with its KV in lines of at least 64 bytes, and SGLang uses the first few. So no extra message
is sent, and a server without this package ignores the note.

The note lists the KV's positions, those of the prompt, and one more for the first token. A name too
long for the note is replaced by its hash: a server that knows the name can recognise it. If there
is still no room, the first parts are merged, without a name.

This module hooks ``send_kv_chunk`` of a prefill server's scheduler, and
``DecodeTransferQueue._commit_transfer_to_req``.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from sglang.srt.disaggregation.utils import _is_fake_transfer, prepare_abort
from sglang.srt.utils.weight_versions import WeightVersionEvent

from sglang_inflight.extensions.contracts.on_rank import contract_of, describe_broken
from sglang_inflight.extensions.contracts.staleness import Age
from sglang_inflight.extensions.disaggregation import DisaggregationSettings
from sglang_inflight.hooking import AROUND, BEFORE, DECODE, PREFILL_SCHEDULER, hook
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.controller import PARTS, Controller
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.scheduler.versions.kv_versions import KVVersions, LabelRuns
from sglang_inflight.scheduler.versions.token_versions import Versions
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import Scheduler

PREFILL = "prefill"
UNKNOWN = "unknown"

# in a row: the index of the first of its 16 numbers (int32) left at 0 by SGLang
_AFTER_THE_TOKEN = 1
_AFTER_THE_COUNTS = 7
_NUMBERS = 16
_SIZE = 4 * (2 * _NUMBERS - _AFTER_THE_TOKEN - _AFTER_THE_COUNTS)
_CHECKSUM = 4  # bytes; one byte with the text's length follows
_HASH = 8  # bytes


class Handover:
    """Writes and reads the notes of one scheduler, on either server of a pair."""

    def __init__(
        self,
        scheduler: Scheduler,
        versions: Versions,
        kv_versions: KVVersions,
        ages: KVAges,
        metrics: Metrics,
        *,
        ends_mismatched: bool,
    ) -> None:
        """``ends_mismatched``: end a request that comes with another version than this server's."""
        self._scheduler = scheduler
        self._versions = versions
        self._kv_versions = kv_versions
        self._ages = ages
        self._metrics = metrics
        self._ends_mismatched = ends_mismatched

    # ---- the prefill server ----------------------------------------------------------

    @hook(
        f"{PREFILL_SCHEDULER}.send_kv_chunk",
        BEFORE,
        via=lambda scheduler: scheduler.inflight.part(Handover),
    )
    def send(self, req: Req, last_chunk: bool = False, *args: Any, **kwargs: Any) -> None:
        """Write the note, before the last KV of ``req`` and its first token are sent."""
        if not last_chunk:
            return
        prompt = self._kv_versions.runs(req, self._versions.label)
        if prompt is None:
            parts = [Part(self._versions.epoch, None, len(req.origin_input_ids))]
        else:
            parts = [Part(label.epoch, label.version, length) for label, length in prompt]
        first = self._versions.of_first_token(req)
        parts.append(Part(first.epoch, first.version, 1))
        note = write_note(_join(parts), room=_room(req), size=_SIZE)
        _put(self._scheduler.disagg_metadata_buffers, req.metadata_buffer_index, note)

    # ---- the decode server -----------------------------------------------------------

    @hook(
        f"{DECODE}.DecodeTransferQueue._commit_transfer_to_req",
        AROUND,
        via=lambda queue: queue.scheduler.inflight.part(Handover),
    )
    def receive(self, commit: Callable[[DecodeRequest], None], decode_req: DecodeRequest) -> None:
        """Read the note, after the KV came. ``commit`` gives the request its first token."""
        req = decode_req.req
        # the token of a re-prefill is thrown away: the request goes on with its former token
        has_first = req.pd_rebootstrap_forced_output_id is None
        commit(decode_req)
        if req.finished():
            return
        made_by = self._read(decode_req)
        self._kv_versions.record_received(req, made_by, self._versions.label)
        current = self._versions.current
        self._ages.receive(req, is_of_others=any(who.version != current for who, _ in made_by))
        first, _ = made_by[-1]
        if has_first:
            self._label_first_token(req, first)
        is_mismatched = first.version not in (current, UNKNOWN)
        if is_mismatched:
            self._metrics.prefill_mismatches.inc()
        contract = contract_of(req) if has_first else None
        why = contract.why_broken(first) if contract is not None else None
        # the contract is the same on every rank
        if contract is not None and self._is_true_on_any_rank(why is not None):
            prepare_abort(
                req,
                describe_broken(why or "another rank could not read the first token's version"),
                status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        elif self._ends_mismatched and self._is_true_on_any_rank(is_mismatched):
            prepare_abort(
                req,
                f"The prefill server had version {first.version!r} and the decode server "
                f"{current!r}: send the request again.",
                status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            )

    def _is_true_on_any_rank(self, here: bool) -> bool:
        """Return whether ``here`` is true on any rank: a rank may not be able to read its row."""
        group = self._scheduler.disagg_decode_transfer_queue.gloo_group
        said = torch.tensor([here], dtype=torch.int32)
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=group)
        return bool(said)

    def _label_first_token(self, req: Req, label: VersionLabel) -> None:
        if label != self._versions.processed:
            req.weight_version_events.append(
                WeightVersionEvent(old_version=label.pack(), num_output_tokens=len(req.output_ids))
            )
        if not label.server:
            record_of(req).part(Age).first_epoch = label.epoch

    def _read(self, decode_req: DecodeRequest) -> LabelRuns:
        req = decode_req.req
        length = req.kv.kv_committed_len + 1
        if _is_fake_transfer(req):
            return [(self._versions.label, length)]
        note = _take(self._scheduler.disagg_metadata_buffers, decode_req.metadata_buffer_index)
        parts = read_note(note, room=_room(req))
        if parts is None:
            return [(VersionLabel(0, UNKNOWN, PREFILL), length)]
        return [(self._label(part), part.length) for part in parts]

    def _label(self, part: Part) -> VersionLabel:
        name = part.version
        if isinstance(name, bytes):
            name = self._name_of(name)
        elif name is None:
            name = UNKNOWN
        label = VersionLabel(part.epoch, name)
        is_own = label == self._versions.label or self._kv_versions.has_been(label)
        return label if is_own else label._replace(server=PREFILL)

    def _name_of(self, hashed: bytes) -> str:
        """Return the name of a hash. A pair's servers get the same names, so it may be known."""
        for label in (self._versions.label, *self._kv_versions.own_labels()):
            if hash_name(label.version) == hashed:
                return label.version
        return f"sha256:{hashed.hex()}"


@PARTS.join()
def make_handover(controller: Controller) -> Handover:
    return Handover(
        controller.scheduler,
        controller.versions,
        controller.kv_versions,
        controller.ages,
        controller.metrics,
        ends_mismatched=read(DisaggregationSettings).pd_mismatch == "abort",
    )


def _room(req: Req) -> int:
    return req.bootstrap_room or 0


def _join(parts: list[Part]) -> list[Part]:
    """Merge the first token's part into the last one if they have the same version."""
    *before, last, token = parts
    if (last.epoch, last.version) != (token.epoch, token.version):
        return parts
    return [*before, last._replace(length=last.length + token.length)]


def _put(buffers: MetadataBuffers, row: int, note: bytes) -> None:
    numbers = torch.frombuffer(bytearray(note), dtype=torch.int32)
    cut = _NUMBERS - _AFTER_THE_TOKEN
    buffers.output_ids[row, _AFTER_THE_TOKEN:] = numbers[:cut].to(buffers.output_ids.device)
    buffers.cached_tokens[row, _AFTER_THE_COUNTS:] = numbers[cut:].to(buffers.output_ids.device)


def _take(buffers: MetadataBuffers, row: int) -> bytes:
    numbers = torch.cat(
        [buffers.output_ids[row, _AFTER_THE_TOKEN:], buffers.cached_tokens[row, _AFTER_THE_COUNTS:]]
    )
    return numbers.cpu().numpy().tobytes()


class Part(NamedTuple):
    """``length`` positions, made by one version and epoch of the prefill server."""

    epoch: int
    # the name, its hash, or None if the note omits it
    version: str | bytes | None
    length: int


# ``Any``: with another type msgspec would not distinguish text from bytes
_decoder = msgspec.msgpack.Decoder(list[tuple[int, Any, int]])


def hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:_HASH]


def write_note(parts: Sequence[Part], *, room: int, size: int) -> bytes:
    """Return a note of ``size`` bytes, at least 32, valid only for the transfer in ``room``."""
    for shorter in _shorter_and_shorter(list(parts)):
        text = msgspec.msgpack.encode(shorter)
        if len(text) <= size - _CHECKSUM - 1:
            break
    body = (bytes([len(text)]) + text).ljust(size - _CHECKSUM, b"\0")
    return _checksum(body, room) + body


def read_note(note: bytes, *, room: int) -> list[Part] | None:
    """Return the note's parts; None if it is of another transfer or in an unknown format."""
    checksum, body = note[:_CHECKSUM], note[_CHECKSUM:]
    if checksum != _checksum(body, room):
        return None
    try:
        parts = [Part(*part) for part in _decoder.decode(body[1 : 1 + body[0]])]
    except msgspec.DecodeError:
        return None
    names = [part.version for part in parts]
    return parts if all(isinstance(name, str | bytes | None) for name in names) else None


def _checksum(body: bytes, room: int) -> bytes:
    return zlib.crc32(body, room & 0xFFFFFFFF).to_bytes(_CHECKSUM, "little")


def _shorter_and_shorter(parts: list[Part]) -> list[list[Part]]:
    hashed = [
        part._replace(version=hash_name(part.version))
        if isinstance(part.version, str) and len(part.version.encode()) > _HASH
        else part
        for part in parts
    ]
    return [
        parts,
        *(
            [*_as_one(hashed[:together]), *hashed[together:]]
            for together in (0, *range(2, len(hashed) + 1))
        ),
    ]


def _as_one(parts: list[Part]) -> list[Part]:
    if not parts:
        return []
    return [Part(parts[-1].epoch, None, sum(part.length for part in parts))]
