"""Saves the served weights of one rank, beside decoding and beside updates.

A save takes no update's turn, and no update waits for it. The saving thread copies the weights
(``copying.py``), computes their digest and writes them. If the version moves on meanwhile, the save
is given up, and its files are deleted. The end of a save is a call of its own: it asks on the
scheduler's thread, where no commit can come between, whether the version is still the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from sglang_inflight.extensions.saves.copying import require_version
from sglang_inflight.extensions.saves.files import (
    check_of,
    delete,
    metadata_of,
    new_file,
    refuse_manifest,
    write_manifest,
)
from sglang_inflight.extensions.saves.manifest import (
    FORMAT,
    RankPart,
    name_of_rank,
    part_file,
    tensors_file,
)
from sglang_inflight.extensions.saves.messages import (
    DiscardSavedCall,
    EndSaveCall,
    SaveCall,
    Written,
)
from sglang_inflight.extensions.saves.reading import ServedWeights, readable_by_a_thread
from sglang_inflight.messages import Done, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.controller import CALLS, PARTS, READERS, Controller, Handler
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.safetensors_file import write_head
from sglang_inflight.scheduler.update.worker import StagingWorker
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest
from sglang_inflight.topology import own_replica
from sglang_inflight.vocabulary.errors import Conflict, Dropped


@dataclass
class _Save:
    """One save. The scheduler's thread writes ``given_up``, the saving thread ``digest``."""

    call: SaveCall
    weight_version: str
    # the number ``LiveWeights.weights``
    weights: int
    # the thread may be late by then
    ends_at: float
    given_up: str | None = None
    # once all files are written
    digest: str | None = None

    @property
    def is_forgotten(self) -> bool:
        """Whether its files are written, and its caller has not ended it in time."""
        return self.digest is not None and time.monotonic() > self.ends_at

    def is_meant_by(self, call: DiscardSavedCall) -> bool:
        return self.call.path == call.path and call.save_id in (None, self.call.save_id)

    def check(self) -> None:
        """Raise if the save was given up, or is out of time."""
        if self.given_up is not None:
            raise Conflict(f"the save was given up: {self.given_up}")
        if time.monotonic() > self.ends_at:
            raise Dropped("the save's time ran out")


class Saving:
    """Saves of one rank, one at a time. Only the scheduler's thread calls it."""

    def __init__(
        self,
        served: ServedWeights,
        answers: AnswerChannel,
        layout: dict[str, str],
        make_worker: Callable[[], StagingWorker],
    ) -> None:
        """``make_worker`` starts the saving thread."""
        self._served = served
        self._live = served.live
        self._answers = answers
        self._layout = layout
        self._make_worker = make_worker
        self._worker: StagingWorker | None = None
        self._save: _Save | None = None

    # ---- calls -------------------------------------------------------------------

    def save(self, call: SaveCall, *, current_version: str) -> None:
        """Begin to save. The saving thread answers."""
        if self._save is not None and not self._save.is_forgotten:
            raise Conflict(f"the weights are being saved already, into {self._save.call.path!r}")
        self._served.require(call.expected_version, current_version=current_version)
        if own_replica():
            # the first replica has the same weights
            self._answers.succeed(call, Written(weight_version=current_version))
            return
        self._save = save = _Save(
            call, current_version, self._live.weights, time.monotonic() + call.timeout_s
        )
        self._submit(call, lambda: self._write(save))

    def end(self, call: EndSaveCall, *, current_version: str) -> None:
        """End the save: the files are of the version that is served now, or it is refused."""
        if own_replica():
            self._answers.succeed(call, Done())
            return
        save = self._save
        if save is None or save.call.save_id != call.save_id or save.digest is None:
            raise Conflict("no such save has written its files on this rank")
        self._save = None
        save.check()
        require_version(self._live, save.weights)
        if current_version != save.weight_version:
            raise Conflict(
                f"the served version was {save.weight_version!r}, and is {current_version!r} now: "
                "save it again"
            )
        if self._live.digest not in (None, save.digest):
            raise Conflict(
                f"the saved weights have the digest {save.digest}, and {self._live.digest} is "
                "served: save them again"
            )
        self._submit(call, lambda: self._end(call))

    def discard(self, call: DiscardSavedCall) -> None:
        """Give up a save into this folder, and delete its files."""
        if own_replica():
            self._answers.succeed(call, Done())
            return
        if self._save is not None and self._save.is_meant_by(call):
            self._save.given_up = "its caller has left, or another rank has refused"
            self._save = None
        self._submit(call, lambda: self._discard(call))

    def stop(self, why: str) -> None:
        """Give up a running save. Nobody reads the weights after the return."""
        if self._save is not None:
            self._save.given_up = why
            self._save = None
        # a discarded save may still read a piece
        self._served.await_no_reader()

    def _submit(self, call: Any, job: Callable[[], Any]) -> None:
        if self._worker is None:
            self._worker = self._make_worker()
        self._worker.submit(call, job)

    # ---- on the saving thread ------------------------------------------------------

    def _write(self, save: _Save) -> Written:
        try:
            return self._write_files(save)
        except BaseException:
            if self._save is save:
                self._save = None
            raise

    def _write_files(self, save: _Save) -> Written:
        path, rank = save.call.path, _own_name()
        tensors, digest = self._served.tensors(save.check), Digest()
        digests: dict[str, str] = {}
        reader, head = HostReader(), write_head(tensors, metadata_of(save.call.save_id))
        written = len(head)
        # the tensors' file is deleted if what comes after it fails, too
        with AbandonableThread(save.check) as thread, ExitStack() as stack:
            if _is_first():
                thread.do(lambda: refuse_manifest(path))
            file = stack.enter_context(new_file(path, tensors_file(rank), thread))
            thread.begin(partial(file.write, head))
            for name, tensor in tensors:
                one = TensorDigest(name, tensor)
                pieces = self._served.pieces_of(tensor, save.weights, save.check)
                for piece in one.read(reader, pieces):
                    thread.end()
                    content = piece.view(torch.uint8).numpy().data
                    written += len(content)
                    thread.begin(partial(file.write, content))
                digests[name] = one.hexdigest()
                digest.add(one.line)
            thread.end()
            numbers = self._served.numbers(save.weights, save.check)
            for lines in numbers.described:
                digest.add(lines)
            part = RankPart(FORMAT, save.call.save_id, self._layout, digests, numbers.written)
            with new_file(path, part_file(rank), thread) as described:
                thread.do(partial(described.write, msgspec.json.encode(part)))
        save.check()
        save.digest = digest.hexdigest()
        return Written(weight_version=save.weight_version, digest=save.digest, bytes=written)

    def _end(self, call: EndSaveCall) -> Done:
        if _is_first():
            write_manifest(call.path, call.manifest, check_of(call.timeout_s))
        return Done()

    def _discard(self, call: DiscardSavedCall) -> Done:
        delete(
            call.path,
            _own_name(),
            call.save_id,
            is_first=_is_first(),
            ranks=_all_names(),
            check=check_of(call.timeout_s),
        )
        return Done()


@PARTS.join()
def make_saving(controller: Controller) -> Saving:
    parts = controller.staging_parts
    served, make_worker = readable_by_a_thread(controller, "inflight-saving")
    return Saving(served, controller.answers, parts.layout, make_worker)


@CALLS.join()
def handlers_of_saves(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    saving = controller.part(Saving)

    def save(call: SaveCall) -> None:
        controller.hollow.require_weights("a save")
        saving.save(call, current_version=controller.versions.current)

    def end(call: EndSaveCall) -> None:
        saving.end(call, current_version=controller.versions.current)

    return {SaveCall: save, EndSaveCall: end, DiscardSavedCall: saving.discard}


@READERS.join()
def give_up(controller: Controller, why: str) -> None:
    controller.part(Saving).stop(why)


def _own_name() -> str:
    parallel = get_parallel()
    return name_of_rank(parallel.pp_rank, parallel.tp_rank)


def _all_names() -> set[str]:
    parallel = get_parallel()
    return {
        name_of_rank(pp, tp) for pp in range(parallel.pp_size) for tp in range(parallel.tp_size)
    }


def _is_first() -> bool:
    parallel = get_parallel()
    return not (parallel.pp_rank or parallel.tp_rank)
