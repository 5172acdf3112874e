"""Keep SGLang's record of the served version, in this process, as the ranks report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.frontend.ranks import rank_of
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.messages import CommitCall, Committed, Described, RankAnswer
from sglang_inflight.topology import Rank

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


class VersionRecord:
    """Follows the first rank's reports. Lives on the front end's event loop.

    The rank names its version in its answer to every commit, rollback, rename and status call. The
    rank's answers arrive in the order of sending, so the last answer is true, however late it
    arrives. A late commit is noted here even if its caller got ``OutcomeUnknown``. The first rank
    stands for all, as in the status.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, first: Rank) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._first = first
        # a list, because a late rank may owe more than one answer
        self._sent: list[tuple[CommitCall, OpenUpdate]] = []

    def expect(self, call: CommitCall, update: OpenUpdate) -> None:
        """Note that ``call``, sent next, commits ``update``."""
        self._sent.append((call, update))

    def take_answer(self, answer: RankAnswer) -> None:
        """Take a rank's answer, also to a call no longer waited for."""
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
        """Record that ``update`` is served.

        SGLang's ``_update_model_path_info`` would also rename the served model to the checkpoint's
        path. Clients name the model in each request and look for it in ``/v1/models``, so its name
        stays.
        """
        tokenizer_manager = self._tokenizer_manager
        if update.kept_kv.flushes:
            clear_preprocessed(tokenizer_manager)
        if update.is_of_checkpoint_engine:
            # --checkpoint-engine-wait-weights-before-ready makes the start wait for it
            tokenizer_manager.initial_weights_loaded = True
        if update.checkpoint is not None:
            tokenizer_manager.model_path = update.checkpoint.model_path
            tokenizer_manager.record_config_updates(
                "tokenizer.update_weights",
                load_format=update.checkpoint.load_format
                or tokenizer_manager.config_value("load_format"),
            )


def clear_preprocessed(tokenizer_manager: TokenizerManager) -> None:
    """Forget preprocessed images and other media; text models have none."""
    if tokenizer_manager.mm_processor is not None:
        tokenizer_manager.mm_processor.clear_preprocess_cache()
