"""Phase one of an update: fill the shadow weights while decoding goes on.

    state    meaning                                   moves to
    EMPTY    the shadow holds the previous version,    OPEN
             or nothing of worth
    OPEN     the staging thread fills the shadow       SEALED, EMPTY (failed, dropped)
    SEALED   complete and checked: this rank's vote    EMPTY (committed, dropped)

A rank votes by answering the ``SealCall``. The front end, which hears every rank of every
replica, decides: a commit if all voted for it in time, otherwise a drop. So no rank waits
for another one, neither in its loop nor in its staging thread, and a rank that dies or
hangs fails the update and nothing else.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.utils import dynamic_import

from sglang_inflight.errors import Conflict, Dropped, Refused
from sglang_inflight.messages import (
    DiskSource,
    DistributedSource,
    DropCall,
    InflightCall,
    JoinGroupCall,
    LeaveGroupCall,
    OpenCall,
    SealCall,
    StageCall,
    TensorSource,
)
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.staging.coverage import can_mark, count_marked, mark
from sglang_inflight.scheduler.staging.digest import digest
from sglang_inflight.scheduler.staging.groups import Groups
from sglang_inflight.scheduler.staging.guard import Guard
from sglang_inflight.scheduler.staging.ipc import receive_ipc
from sglang_inflight.scheduler.staging.pace import Pace
from sglang_inflight.scheduler.staging.shadow import Shadow, why_not_shadowed
from sglang_inflight.scheduler.staging.sources import read_disk, read_tensors, receive
from sglang_inflight.scheduler.staging.worker import Job, StagingWorker
from sglang_inflight.settings import Settings

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner


class StagingState(enum.Enum):
    EMPTY = "empty"
    OPEN = "open"
    SEALED = "sealed"


class _Update:
    """One update on its way through this rank."""

    def __init__(self, call: OpenCall) -> None:
        self.id = call.update_id
        self.partial = call.partial
        self.roles: set[str] = set()
        self.names: set[str] = set()
        self.tensors = 0
        self.bytes = 0
        self.digest = ""
        self.model_path: str | None = None
        self.load_format: str | None = None
        # set by the scheduler's thread, read by the staging thread
        self.dropped: str | None = None
        # set by the staging thread, read by the scheduler's thread
        self.sealed = False
        # why a call of this update failed, so that it cannot be sealed any more
        self.failed: str | None = None

    def check(self) -> None:
        if self.dropped is not None:
            raise Dropped(f"the update was dropped: {self.dropped}")
        if self.failed is not None:
            raise Dropped(f"a call of the update failed: {self.failed}")


class _Runner:
    """One model of this rank with its shadow: the target, or a draft."""

    def __init__(self, role: str, runner: ModelRunner) -> None:
        self.role = role
        self.runner = runner
        self.guard: Guard | None = None
        self._shadow: Shadow | None = None

    @property
    def shadow(self) -> Shadow:
        """Built at the first update, so that a server that has none pays nothing."""
        if self._shadow is None:
            self._shadow = Shadow(self.runner.model, self._note_write)
        return self._shadow

    def load_direct(
        self, twin: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load tensors named and shaped as this rank's own parameters."""
        parameters = dict(twin.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)
            self._note_write(name)

    def _note_write(self, parameter: str) -> None:
        if self.guard is not None:
            self.guard.note_write(parameter)


class Staging:
    """The shadow weights of one rank.

    The scheduler's thread moves the state and puts jobs in; the jobs run on the staging
    thread, one after the other. A drop sets a mark that the running job looks at between
    two tensors; whatever it had written is never committed.
    """

    def __init__(
        self, scheduler: Scheduler, answers: AnswerChannel, pace: Pace, settings: Settings
    ) -> None:
        self._answers = answers
        self._pace = pace
        self._settings = settings
        updater = scheduler.weight_updater
        self._runners = [_Runner(role, runner) for role, runner in updater._select_runners("all")]
        self._tp_worker = scheduler.tp_worker
        self._device = _device(self._runners[0].runner)
        self._worker = StagingWorker(answers, self._device, settings.stage_nice)
        self._groups = Groups(self._check_current, settings.group_timeout_s)
        self._skippable: frozenset[str] | None = None
        self._update: _Update | None = None
        self._holds_previous = False
        self._exchanged: Any = None
        self.refusal = next(
            (
                f"weights of the {r.role} model cannot be staged: {reason}"
                for r in self._runners
                if (reason := why_not_shadowed(r.runner.model)) is not None
            ),
            None,
        )

    # ---- calls, on the scheduler's thread ----------------------------------------

    def open(self, call: OpenCall, *, current_version: str) -> None:
        if self.refusal is not None:
            raise Refused(self.refusal)
        if self._update is not None:
            raise Conflict("another weight update is open: end or abort it first")
        if call.expected_version is not None and call.expected_version != current_version:
            raise Conflict(
                f"expected_version is {call.expected_version!r}, but {current_version!r} is serving"
            )
        update = self._update = _Update(call)
        self._holds_previous = False
        self._submit(update, call, lambda: self._prepare(update, call))

    def stage(self, call: StageCall) -> None:
        update = self._expect(call.update_id, StagingState.OPEN)
        self._submit(update, call, lambda: self._fill(update, call))

    def seal(self, call: SealCall) -> None:
        update = self._expect(call.update_id, StagingState.OPEN)
        self._submit(update, call, lambda: self._finish(update))

    def drop(self, call: DropCall) -> None:
        """Forget an update. It is no error if this rank never had it."""
        update = self._update
        if update is not None and update.id == call.update_id:
            update.dropped = call.reason
            self._update = None
        # answered when the staging thread has let go of the shadow
        self._worker.submit(call, dict)

    def take(self, update_id: str) -> _Update:
        """The sealed update, to be committed now."""
        update = self._expect(update_id, StagingState.SEALED)
        self._update = None
        return update

    def join_group(self, call: JoinGroupCall) -> None:
        self._worker.submit(call, _nothing_to_tell(lambda: self._groups.join(call)))

    def leave_group(self, call: LeaveGroupCall) -> None:
        self._worker.submit(call, _nothing_to_tell(lambda: self._groups.leave(call.group_name)))

    def exchange(self, swap: Any, roles: Iterable[str]) -> int:
        """Swap live weights and shadow of ``roles`` through ``swap``; the bytes swapped."""
        swapped = 0
        for runner in self._runners:
            if runner.role in roles:
                for _, live, shadow in runner.shadow.pairs:
                    swap(live, shadow)
                    swapped += live.nbytes
        self._holds_previous = True
        return swapped

    def wait_for(self, exchanged: Any) -> None:
        """Do not write the shadow before the event ``exchanged`` on its device."""
        self._exchanged = exchanged

    @property
    def state(self) -> StagingState:
        if self._update is None:
            return StagingState.EMPTY
        return StagingState.SEALED if self._update.sealed else StagingState.OPEN

    @property
    def roles(self) -> set[str]:
        return {runner.role for runner in self._runners}

    @property
    def can_roll_back(self) -> bool:
        return self.state is StagingState.EMPTY and self._holds_previous

    def note_model_path(self, update: _Update) -> None:
        """Tell upstream's readers of the path where the weights came from."""
        if update.model_path is None:
            return
        for runner in self._runners:
            if runner.role in update.roles:
                runner.runner.update_model_fields(
                    runner.runner.model,
                    model_path=update.model_path,
                    load_format=update.load_format or "auto",
                    load_config=LoadConfig(load_format=update.load_format or "auto"),
                )
                runner.runner.model_config.model_path = update.model_path

    def describe(self) -> dict[str, Any]:
        update = self._update
        return {
            "state": self.state.value,
            "update_id": update.id if update else None,
            "tensors": update.tensors if update else 0,
            "bytes": update.bytes if update else 0,
            "can_roll_back": self.can_roll_back,
            "refusal": self.refusal,
        }

    def _expect(self, update_id: str, state: StagingState) -> _Update:
        update = self._update
        if update is None or update.id != update_id or self.state is not state:
            raise Conflict(f"no weight update {update_id!r} is {state.value}")
        return update

    def _submit(self, update: _Update, call: InflightCall, job: Job) -> None:
        def one_failure_fails_the_update() -> dict[str, Any]:
            try:
                update.check()
                return job()
            except Exception as error:
                update.failed = update.failed or str(error)
                raise

        self._worker.submit(call, one_failure_fails_the_update)

    # ---- jobs, on the staging thread ---------------------------------------------

    def _check_current(self) -> None:
        update = self._update
        if update is None:
            raise Dropped("the update was dropped")
        update.check()

    def _prepare(self, update: _Update, call: OpenCall) -> dict[str, Any]:
        """Start from the live weights, or from marks that show what was not written.

        The live weights are only read, and only the loop's thread changes them, in a
        commit, which cannot be while an update is open.
        """
        if self._skippable is None:
            self._skippable = self._names_served()
        if self._exchanged is not None:
            self._exchanged.synchronize()
        for runner in self._selected(call.selector):
            update.roles.add(runner.role)
            for _, live, shadow in runner.shadow.pairs:
                update.check()
                if self._is_partial(update, runner) or not can_mark(shadow):
                    shadow.copy_(live)
                else:
                    mark(shadow)
                self._pace.spend(live.nbytes)
        return {}

    def _fill(self, update: _Update, call: StageCall) -> dict[str, Any]:
        """Load one call's tensors into the shadow, through the model's own loader."""
        update.check()
        started = time.perf_counter()
        runners = [r for r in self._selected(call.selector) if r.role in update.roles]
        if not runners:
            raise Refused(f"selector {call.selector!r} selects no model of this update")
        guards = [self._load(update, runner, call) for runner in runners]
        if isinstance(call.source, DiskSource):
            update.model_path = call.source.model_path
            update.load_format = call.source.load_format
        return {
            "staged_s": time.perf_counter() - started,
            "tensors": guards[0].tensors,
            "bytes": guards[0].bytes,
        }

    def _load(self, update: _Update, runner: _Runner, call: StageCall) -> Guard:
        guard = runner.guard = Guard(
            skippable=self._skippable or frozenset(),
            check_finite=self._settings.check_finite,
        )
        weights = guard.watch(self._paced(update, self._read(update, runner, call)))
        twin = runner.shadow.twin
        try:
            with set_default_torch_dtype(runner.runner.model_config.dtype):
                _loader(call, runner)(twin, weights)
            # a loader may stop before the end: what it did not take is not loaded
            for _ in weights:
                pass
        except Exception as error:
            raise guard.explain(error) from error
        finally:
            runner.guard = None
        update.names |= guard.names
        return guard

    def _read(
        self, update: _Update, runner: _Runner, call: StageCall
    ) -> Iterator[tuple[str, torch.Tensor]]:
        source = call.source
        if isinstance(source, DiskSource):
            return read_disk(source, runner.runner)
        if isinstance(source, TensorSource):
            return read_tensors(source, self._device)
        if isinstance(source, DistributedSource):
            return receive(source, self._groups, self._device)
        return receive_ipc(source, self._device, update.check)

    def _paced(
        self, update: _Update, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            update.check()
            if isinstance(tensor, torch.Tensor):
                update.bytes += tensor.nbytes
                self._pace.spend(tensor.nbytes)
            update.tensors += 1
            yield name, tensor

    def _finish(self, update: _Update) -> dict[str, Any]:
        """Check that the update is whole; after this nothing can fail any more."""
        update.check()
        started = time.perf_counter()
        if update.tensors == 0:
            raise Refused("the update holds no tensor")
        weights: list[tuple[str, torch.Tensor]] = []
        for runner in self._runners:
            if runner.role not in update.roles:
                continue
            if not self._is_partial(update, runner):
                self._check_complete(update, runner)
            weights += [(f"{runner.role}.{n}", shadow) for n, _, shadow in runner.shadow.pairs]
        update.digest = digest(weights, self._pace.spend)
        update.check()
        update.sealed = True
        return {
            "staged_s": time.perf_counter() - started,
            "digest": update.digest,
            "tensors": update.tensors,
            "bytes": update.bytes,
        }

    def _check_complete(self, update: _Update, runner: _Runner) -> None:
        for name, _, shadow in runner.shadow.pairs:
            update.check()
            missing = count_marked(shadow) if can_mark(shadow) else 0
            self._pace.spend(shadow.nbytes)
            if missing:
                unsent = sorted((self._skippable or frozenset()) - update.names)
                named = f"; not sent: {', '.join(unsent[:8])}" if unsent else ""
                more = f" and {len(unsent) - 8} more" if len(unsent) > 8 else ""
                raise Refused(
                    f"the update is not complete: {missing} of {shadow.numel()} elements of "
                    f"{name!r} were not sent{named}{more}. Send them, or set partial=true"
                )

    def _is_partial(self, update: _Update, runner: _Runner) -> bool:
        # a draft takes what it shares with the target and keeps the rest
        return update.partial or runner.role != "target"

    def _selected(self, selector: str) -> list[_Runner]:
        roles = {"target", "draft"} if selector == "all" else {selector}
        return [r for r in self._runners if r.role.split("_")[0] in roles]

    def _names_served(self) -> frozenset[str]:
        """Tensor names in the checkpoint that the server was started with."""
        names: set[str] = set()
        for runner in self._runners:
            # without files here (a remote or dummy checkpoint) no name may be skipped
            for file in Path(runner.runner.model_config.model_path).glob("*.safetensors"):
                with safe_open(file, framework="pt") as tensors:
                    names.update(tensors.keys())
        return frozenset(names)


def _loader(call: StageCall, runner: _Runner) -> Any:
    """``load(twin, weights)`` for the load_format of the call."""
    source = call.source
    if not isinstance(source, TensorSource) or source.load_format in (None, "flattened_bucket"):
        return lambda twin, weights: twin.load_weights(weights)
    if source.load_format == "direct":
        return runner.load_direct
    if source.load_format in runner.runner.weight_updater.custom_weight_loaders:
        return dynamic_import(source.load_format)
    raise Refused(f"load_format {source.load_format!r} is not known for tensors")


def _nothing_to_tell(action: Callable[[], None]) -> Job:
    def job() -> dict[str, Any]:
        action()
        return {}

    return job


def _device(runner: ModelRunner) -> torch.device:
    parameter = next(runner.model.parameters())
    return parameter.device
