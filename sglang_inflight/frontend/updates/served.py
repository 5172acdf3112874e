"""SGLang's readers in this process name the weights that the ranks serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.frontend.caches import clear_preprocessed
from sglang_inflight.frontend.ranks import Rank, rank_of
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.messages import CommitCall, Committed, Described, RankAnswer

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager


class Served:
    """Follows what the first rank says of itself. Lives on the front end's event loop.

    The rank names its version in the answer to every commit, rollback, rename and question for
    the status. Its answers arrive in the order in which it sent them, so the last one that was
    heard is true, whoever waits for it and however late it comes: a commit whose caller was told
    ``OutcomeUnknown`` is known here when the rank has done it. The first rank stands for all, as
    in the status.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, first: Rank) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._first = first
        # the rank may be late with more than one
        self._sent: list[tuple[CommitCall, OpenUpdate]] = []

    def expect(self, call: CommitCall, update: OpenUpdate) -> None:
        """``call`` is about to be sent, and commits ``update``."""
        self._sent.append((call, update))

    def hear(self, answer: RankAnswer) -> None:
        """Also that of a call which was given up."""
        if rank_of(answer) != self._first:
            return
        update = self._take(answer.call_id)
        match answer:
            case Committed(weight_version=version):
                self._name(version)
                if update is not None:
                    self._describe(update)
            case Described(weights=weights):
                self._name(weights.weight_version)

    def _take(self, call_id: str) -> OpenUpdate | None:
        for sent in self._sent:
            if sent[0].call_id == call_id:
                self._sent.remove(sent)
                return sent[1]
        return None

    def _name(self, version: str) -> None:
        if version != self._tokenizer_manager.config_value("weight_version"):
            self._tokenizer_manager._update_weight_version_if_provided(version)

    def _describe(self, update: OpenUpdate) -> None:
        """``update`` is served.

        Upstream's ``_update_model_path_info`` takes the path of a checkpoint for the served
        model's name too. Clients name their model in each request, and look for it in
        ``/v1/models``: the name stays.
        """
        tokenizer_manager = self._tokenizer_manager
        if update.kv_policy == "recompute":
            clear_preprocessed(tokenizer_manager)
        if update.is_of_checkpoint_engine:
            # a start waits for it, with --checkpoint-engine-wait-weights-before-ready
            tokenizer_manager.initial_weights_loaded = True
        if update.checkpoint is not None:
            tokenizer_manager.model_path = update.checkpoint.model_path
            tokenizer_manager.record_config_updates(
                "tokenizer.update_weights",
                load_format=update.checkpoint.load_format
                or tokenizer_manager.config_value("load_format"),
            )
