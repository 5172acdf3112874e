"""A prefill server's note on its KV, and the decode server's labels from the note."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_inflight.extensions.disaggregation import handover as handovers
from sglang_inflight.extensions.disaggregation.handover import (
    Handover,
    Part,
    hash_name,
    read_note,
    write_note,
)
from sglang_inflight.scheduler.versions import kv_versions, token_versions
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.scheduler.versions.kv_versions import KVVersions
from sglang_inflight.scheduler.versions.token_versions import Versions
from sglang_inflight.vocabulary.kept_kv import FENCE
from sglang_inflight.vocabulary.labels import VersionLabel

SIZE, ROOM = 96, (1 << 62) + 5
LONG = "a very long name " * 12


def write_and_read(*parts: Part) -> list[Part] | None:
    note = write_note(parts, room=ROOM, size=SIZE)
    assert len(note) == SIZE
    return read_note(note, room=ROOM)


def test_note_is_read_back() -> None:
    parts = [Part(3, "step-41", 4096), Part(4, "größer 42", 12), Part(5, "x" * 30, 1)]
    assert write_and_read(*parts) == parts


def test_long_version_name_is_sent_as_hash() -> None:
    parts = [Part(0, "v1", 7), Part(1, LONG, 1)]
    assert write_and_read(*parts) == [parts[0], Part(1, hash_name(LONG), 1)]


def test_full_note_merges_oldest_versions() -> None:
    """The newest versions keep their names, and the earlier versions become one length."""
    parts = [Part(epoch, f"{epoch} {LONG}", 10_000) for epoch in range(20)]
    told = write_and_read(*parts)
    assert told is not None
    assert told[0].version is None
    assert (
        told[1:] == [p._replace(version=hash_name(str(p.version))) for p in parts][1 - len(told) :]
    )
    assert len(told) > 3
    assert sum(part.length for part in told) == 20 * 10_000


def test_foreign_bytes_are_no_note() -> None:
    note = write_note([Part(3, "v", 4)], room=ROOM, size=SIZE)
    assert read_note(note, room=ROOM + 1) is None
    assert read_note(bytes(SIZE), room=ROOM) is None
    assert read_note(note[:-1] + b"?", room=ROOM) is None


@pytest.mark.parametrize("part", [Part("3", "v", 4), Part(3, ["v"], 4)])  # type: ignore[arg-type]
def test_note_of_another_format_is_ignored(part: Any) -> None:
    """A newer package may write such a note, and reading it must not end the loop."""
    assert read_note(write_note([part], room=ROOM, size=SIZE), room=ROOM) is None


class Server:
    """The parts of a prefill or decode server used in a transfer. Its KV pool has 64 slots."""

    def __init__(self, buffers: MetadataBuffers, *, ends_mismatched: bool = False) -> None:
        pool = SimpleNamespace(req_to_token=torch.arange(64, dtype=torch.int32).reshape(4, 16))
        scheduler: Any = SimpleNamespace(
            disagg_metadata_buffers=buffers,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=SimpleNamespace(size_full=64, page_size=1),
            tree_cache=None,
            is_mixed_chunk=False,
            disagg_decode_transfer_queue=SimpleNamespace(gloo_group=None),
        )
        self.scheduler = scheduler
        self.live: set[Req] = set()
        requests: Any = SimpleNamespace(
            pending_batches=[], live=lambda: self.live, running=set,
            without_kv=list,
        )  # fmt: skip
        boundary: Any = SimpleNamespace(
            requests=requests, sessions=list, free_sessions=lambda names: [], refreshing=list
        )
        metrics: Any = SimpleNamespace(prefill_mismatches=SimpleNamespace(inc=self.count))
        self.mismatches = 0
        self.kv_versions = KVVersions(self.scheduler)
        self.versions = Versions(requests, self.kv_versions)
        self.ages = KVAges(boundary)
        self.handover = Handover(
            self.scheduler, self.versions, self.kv_versions, self.ages, metrics,
            ends_mismatched=ends_mismatched,
        )  # fmt: skip

    def count(self) -> None:
        self.mismatches += 1

    def request(self, row: int) -> Req:
        req = Req("r", "", array("q", range(10)), SamplingParams(), bootstrap_room=ROOM)
        req.metadata_buffer_index = row
        req.kv.req_pool_idx, req.kv.kv_committed_len = row, 10
        return req

    def kv_spans(self, req: Req) -> Any:
        return [
            (label.server, label.version, length)
            for label, length in self.kv_versions.runs(req, self.versions.label) or []
        ]


@pytest.fixture
def buffers() -> MetadataBuffers:
    """Buffers shared by both servers: one writes, the other reads."""
    return MetadataBuffers(
        4, hidden_size=8, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=1
    )


class Process:
    """Label of a process's server. This process stands for two servers."""

    def __init__(self) -> None:
        self.label = VersionLabel(0, "v0")

    def put(self, versions: Versions, label: VersionLabel) -> None:
        old, self.label = self.label, label
        token_versions._record(versions._requests.live(), old)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(token_versions, "_processed", lambda: process.label)
    monkeypatch.setattr(Versions, "_put", lambda versions, label: process.put(versions, label))
    monkeypatch.setattr(handovers, "_is_fake_transfer", lambda req: False)
    monkeypatch.setattr(kv_versions, "count_host_slots", lambda tree_cache: 0)
    return process


def send(prefill: Server, *, reused: int = 0) -> None:
    """Send a prompt. Its first ``reused`` positions were cached before the last update."""
    req = prefill.request(row=1)
    batch: Any = SimpleNamespace(
        out_cache_loc=prefill.scheduler.req_to_token_pool.req_to_token[1, reused:10].long(),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )
    prefill.kv_versions.record_launch(batch)
    req.output_ids.append(7)
    prefill.handover.send(req, True)
    prefill.scheduler.disagg_metadata_buffers.set_buf(req)


def receive(decode: Server, *, of_own_cache: int = 0) -> Req:
    req = decode.request(row=1)
    req.kv.cache_protected_len = of_own_cache
    decode.live.add(req)
    decode_req: Any = SimpleNamespace(req=req, metadata_buffer_index=1)
    decode.handover.receive(lambda _: req.output_ids.append(7), decode_req)
    return req


def token_spans(req: Req, current: str) -> Any:
    events = [(e.old_version, e.num_output_tokens) for e in req.weight_version_events]
    return [*events, (current, len(req.output_ids))]


def test_same_version_on_both_servers_is_no_mismatch(buffers: MetadataBuffers) -> None:
    send(Server(buffers))
    decode = Server(buffers)
    req = receive(decode)
    assert req.weight_version_events == []
    assert decode.kv_spans(req) == [("", "v0", 10)]
    assert decode.mismatches == 0


def test_note_and_sglangs_fields_do_not_overlap(buffers: MetadataBuffers) -> None:
    """SGLang writes its own numbers after the note, and reads them back unchanged."""
    prefill = Server(buffers)
    buffers.output_ids.fill_(-1)
    buffers.cached_tokens.fill_(-1)
    send(prefill)
    output_ids, cached_tokens, *_ = buffers.get_buf(1)
    assert output_ids[0] == 7
    assert cached_tokens[:7].tolist() == [0] * 7
    note = handovers._take(buffers, 1)
    assert read_note(note, room=ROOM) == [Part(0, "v0", 11)]


def test_newer_prefill_version_is_labelled(buffers: MetadataBuffers, process: Process) -> None:
    prefill, decode = Server(buffers), Server(buffers)
    prefill.versions.begin_epoch("v1")
    send(prefill, reused=4)
    process.label = VersionLabel(0, "v0")
    req = receive(decode, of_own_cache=2)
    assert token_spans(req, "0 v0") == [("1@prefill v1", 1), ("0 v0", 1)]
    assert decode.kv_spans(req) == [("", "v0", 4), ("prefill", "v1", 6)]
    assert decode.mismatches == 1


def test_hashed_version_name_is_resolved_on_decode_server(
    buffers: MetadataBuffers, process: Process
) -> None:
    prefill = Server(buffers)
    prefill.versions.begin_epoch(LONG)
    send(prefill)
    told = {LONG: LONG, "v": f"sha256:{hash_name(LONG).hex()}"}
    for had, name in told.items():
        decode = Server(buffers)
        process.label = VersionLabel(6, "v6")
        decode.kv_versions.change(VersionLabel(5, had), process.label)
        assert decode.kv_spans(receive(decode)) == [("prefill", name, 10)]


def test_prefill_server_without_us_is_unknown_version(buffers: MetadataBuffers) -> None:
    decode = Server(buffers)
    req = receive(decode)
    assert decode.kv_spans(req) == [("prefill", "unknown", 10)]
    assert token_spans(req, "0 v0")[0] == ("0@prefill unknown", 1)
    # a mismatch is not known either
    assert decode.mismatches == 0


def test_older_kv_is_not_cached_behind_the_fence(buffers: MetadataBuffers) -> None:
    send(Server(buffers))
    decode = Server(buffers)
    decode.versions.begin_epoch("v1")
    assert not receive(decode).skip_radix_cache_insert
    decode.ages.begin(FENCE, 1)
    assert receive(decode).skip_radix_cache_insert


def test_reprefilled_request_keeps_token_versions(buffers: MetadataBuffers) -> None:
    """The prompt is re-prefilled: the request keeps its tokens, and gets new KV."""
    prefill, decode = Server(buffers), Server(buffers)
    req = decode.request(row=1)
    decode.live.add(req)
    req.pd_rebootstrap_forced_output_id = 9
    decode.versions.begin_epoch("v1")
    send(prefill)

    def commit(_: object) -> None:
        req.output_ids.append(9)
        req.pd_rebootstrap_forced_output_id = None

    decode_req: Any = SimpleNamespace(req=req, metadata_buffer_index=1)
    decode.handover.receive(commit, decode_req)
    assert token_spans(req, "1 v1") == [("0 v0", 1), ("1 v1", 1)]
    assert decode.kv_spans(req) == [("", "v1", 10)]


def test_recomputed_prompt_forgets_first_tokens_version(buffers: MetadataBuffers) -> None:
    prefill = Server(buffers)
    req = prefill.request(row=1)
    req.output_ids.append(7)
    prefill.live.add(req)
    prefill.versions.begin_epoch("v1")
    assert prefill.versions.of_first_token(req).version == "v0"
    prefill.versions.forget_tokens(req)
    assert prefill.versions.of_first_token(req).version == "v1"


def test_kv_versions_survive_host_backup(buffers: MetadataBuffers) -> None:
    decode = Server(buffers)
    first, second = decode.request(row=1), decode.request(row=2)
    for req in (first, second):
        req.output_ids.append(7)
    decode.kv_versions.back_up(first)
    decode.versions.begin_epoch("v1")
    whole_row: Any = SimpleNamespace(
        out_cache_loc=torch.arange(64),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )
    decode.kv_versions.record_launch(whole_row)
    decode.kv_versions.back_up(second)
    for req, row in ((first, 3), (second, 0)):
        req.kv.req_pool_idx = row
    decode.versions.begin_epoch("v2")
    decode.kv_versions.record_launch(whole_row)
    for req in (first, second):
        decode.kv_versions.restore(req)
    assert decode.kv_spans(first) == [("", "v0", 10)]
    assert decode.kv_spans(second) == [("", "v1", 10)]


def test_mismatch_ends_request_when_configured(
    buffers: MetadataBuffers, process: Process, tmp_path: Path
) -> None:
    meeting = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        send(Server(buffers))
        decode = Server(buffers, ends_mismatched=True)
        assert not receive(decode).finished()
        decode.versions.begin_epoch("v1")
        req = receive(decode)
    finally:
        torch.distributed.destroy_process_group()
    reason: Any = req.finished_reason
    assert reason.status_code == 503
    assert "'v0'" in reason.message
    assert "'v1'" in reason.message
