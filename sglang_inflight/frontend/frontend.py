"""Our root object in each front-end process, and its answer about the server's state."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sglang.utils import TypeBasedDispatcher

from sglang_inflight import capabilities
from sglang_inflight.frontend.aio import Lifetime, keep
from sglang_inflight.frontend.control_calls import ControlCalls
from sglang_inflight.frontend.handlers import Handlers, direct_handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.rank_versions import RankVersions
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.requests.model_names import ModelNames
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.two_phase import TwoPhase
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.frontend.updates.version_record import VersionRecord
from sglang_inflight.joints import HasParts, Joint
from sglang_inflight.messages import (
    Changed,
    Committed,
    Described,
    GenerationContinues,
    RankAnswer,
    RankIsSilent,
    answers,
)
from sglang_inflight.metrics import FrontEndMetrics
from sglang_inflight.settings import Settings, extensions_on
from sglang_inflight.vocabulary.answers import Capabilities, RankStatus, Status
from sglang_inflight.vocabulary.errors import InflightError, NotOffered
from sglang_inflight.vocabulary.labels import AdapterLabel
from sglang_inflight.vocabulary.version import VERSION

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

# changes the handlers of a new front end
HANDLERS: Joint[Callable[[Frontend, TokenizerManager, Handlers], Handlers]] = Joint("handlers")

# makes an extension's object of a new front end; others find it by ``Frontend.part``
FRONT_PARTS: Joint[Callable[[Frontend, TokenizerManager], object]] = Joint("parts of a front end")

# lets requests end, before the pauses of a server that shuts down are released
ENDS: Joint[Callable[[Frontend], Awaitable[None]]] = Joint("end of a server")
# takes in a rank's answer, after the front end has noted the served versions; not in a worker
ANSWERS: Joint[Callable[[Frontend, RankAnswer], None]] = Joint("answers")
# returns why the server is behind its fleet and takes no new request, or None
BEHIND: Joint[Callable[[Frontend], str | None]] = Joint("behind the fleet")
# returns why the server leaves its fleet, or None
LEAVING: Joint[Callable[[Frontend], str | None]] = Joint("leaving the fleet")


class Frontend(HasParts):
    """Coordinate pauses and updates for one ``TokenizerManager``. The schedulers hold the state.

    With several tokenizer workers, a worker forwards calls to the owner (``workers/``); its
    ``Frontend`` handles only its own requests.
    """

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self.tokenizer_manager = tokenizer_manager
        # whether this process is one of several tokenizer workers
        self.is_worker = False
        self._instance = uuid.uuid4().hex
        self.lifetime = Lifetime(tokenizer_manager)
        self.ranks = Ranks(tokenizer_manager, self.lifetime)
        self.control_calls = ControlCalls(self.ranks, self.lifetime)
        self.control_calls.route(tokenizer_manager)
        metrics = FrontEndMetrics()
        can = self.can = capabilities.of(tokenizer_manager.server_args)
        settings = self.settings = Settings.from_environment()
        self._extensions = tuple(each.name for each in extensions_on())
        self.pauses = Pauses(
            tokenizer_manager, self.ranks, metrics, can, lease_s=settings.pause_lease_s
        )
        self.model_names = ModelNames(tokenizer_manager, known_only=settings.model_names == "known")
        self.groups = Groups(self.ranks, settings)
        idle = NoRequestsRunning(tokenizer_manager, self.pauses, can)
        version = tokenizer_manager.config_value("weight_version")
        self.versions = RankVersions(self.ranks.all, version)
        # ends requests that wait in this process, by the caller's name, and returns their number
        self.end_waits: Callable[[str], int] = lambda _: 0
        # the owner of several tokenizer workers sends them its state
        self.on_change: Callable[[], None] = lambda: None
        self.pauses.on_change = lambda: self.on_change()
        self._record = VersionRecord(tokenizer_manager, min(self.ranks.all))
        two_phase = self.two_phase = TwoPhase(
            tokenizer_manager, self.ranks, self._record, metrics, can
        )
        # whether a rank's last answer says that weights are missing; ``/ready`` reads it
        self.is_hollow = settings.require_update
        self.updates = Updates(tokenizer_manager, two_phase, self.groups, idle, settings, can)
        self._handlers = direct_handlers(
            tokenizer_manager,
            self.pauses,
            self.updates,
            self.groups,
            self.status,
        )
        # returns the version that new requests of an adapter get, or None if it is not loaded
        self.adapter_label: Callable[[str], AdapterLabel | None] = lambda _: None
        self.make_parts(make(self, tokenizer_manager) for make in FRONT_PARTS)
        for change in HANDLERS:
            self._handlers = change(self, tokenizer_manager, self._handlers)
        tokenizer_manager._result_dispatcher += TypeBasedDispatcher(
            [
                *((answer, self._take_answer) for answer in answers()),
                (RankIsSilent, self.ranks.take_silence),
                (GenerationContinues, self._generation_continues),
            ]
        )

    @property
    def handlers(self) -> Handlers:
        """Handlers of calls. Raises ``NotOffered`` in a worker: only the owner orders calls."""
        self.require_owner()
        return self._handlers

    def require_owner(self) -> None:
        if self.is_worker:
            raise NotOffered(
                "this process is one of several tokenizer workers, which cannot take control "
                "calls: call the server over HTTP"
            )

    def _take_answer(self, answer: RankAnswer) -> None:
        """Take in a rank's answer to a call of ours or of SGLang's; the call's id tells which."""
        match answer:
            case Committed(hollow=hollow) | Changed(hollow=hollow):
                self.is_hollow = hollow is not None
            case Described(memory=memory):
                self.is_hollow = memory.hollow is not None
        if not self.is_worker:
            # a worker takes this state from the owner, whose messages have another order
            self._record.take_answer(answer)
            self.pauses.take_answer(answer)
            self.versions.take_answer(answer)
            for take_in in ANSWERS:
                take_in(self, answer)
            self.on_change()
        self.ranks.take_answer(answer)
        self.control_calls.take_rank_answer(answer)

    def _generation_continues(self, _: GenerationContinues) -> None:
        """Refresh the mirrored pause state: a lease has expired on the ranks."""
        self.in_background(self.pauses.ask_status())

    def in_background(self, doing: Coroutine[Any, Any, Any]) -> None:
        """Run ``doing`` without a waiting caller; log its failure."""
        keep(self.tokenizer_manager.asyncio_tasks, _logged(doing))

    @property
    def queues_in_pauses(self) -> bool:
        """Whether schedulers queue the requests of a pause; read by patch 0003."""
        return not self.pauses.sglangs.is_the_servers

    async def status(self) -> Status:
        """Return state, versions and staging progress, of the first rank and of each rank."""
        ranks = await self.pauses.ask_status()
        return write_status(
            ranks,
            sglangs_pause=self.pauses.sglangs.holds,
            behind=self.why_behind,
            draining=next(filter(None, (why(self) for why in LEAVING)), None),
            extensions=self._extensions,
            instance=self._instance,
        )

    def why_not_ready(self) -> str | None:
        """Return why no new request is taken, besides pauses and SGLang's own reasons, or None."""
        if self.is_hollow:
            return "the weights are hollow: updates must bring all of them first"
        return self.why_behind

    @property
    def why_behind(self) -> str | None:
        """Why the server is behind its fleet, or None."""
        return next(filter(None, (why(self) for why in BEHIND)), None)


async def _logged(doing: Coroutine[Any, Any, Any]) -> None:
    try:
        await doing
    except InflightError as error:
        logger.warning("%s", error)


def write_status(
    ranks: list[Described],
    *,
    sglangs_pause: bool,
    behind: str | None = None,
    draining: str | None = None,
    extensions: tuple[str, ...] = (),
    instance: str = "",
) -> Status:
    """Return the first rank's state, and each rank's. Replicas differ only for moments.

    ``paused`` is true if any rank is paused. Ranks know nothing of SGLang's own pause.
    """
    pause: dict[str, Any] = {"paused": any(rank.pause.paused for rank in ranks)}
    if sglangs_pause:
        pause = {"paused": True, "mode": "abort"}
    return Status(
        **_side_by_side(ranks[0]) | pause,
        role=ranks[0].role,
        behind=behind,
        draining=draining,
        extensions=extensions,
        inflight_version=VERSION,
        instance=instance,
        capabilities=_merge([rank.capabilities for rank in ranks]),
        ranks=tuple(
            RankStatus(
                **_side_by_side(rank),
                dp_rank=rank.dp_rank,
                tp_rank=rank.tp_rank,
                pp_rank=rank.pp_rank,
            )
            for rank in ranks
        ),
    )


def _side_by_side(rank: Described) -> dict[str, Any]:
    """Return the fields of ``State``."""
    return {**rank.pause, **rank.weights, "staging": rank.staging, "memory": rank.memory}


def _merge(tables: list[Capabilities]) -> Capabilities:
    """Return the first reason of any rank for each row. Stages have different models."""
    return Capabilities(
        **{
            row: next((table[row] for table in tables if table[row] is not None), None)
            for row in Capabilities.__struct_fields__
        }
    )
