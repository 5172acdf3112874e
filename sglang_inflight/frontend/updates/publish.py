"""What SGLang's readers in this process are told of the weights that are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.frontend.caches import clear_preprocessed
from sglang_inflight.frontend.updates.open_update import OpenUpdate

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager


def publish(
    tokenizer_manager: TokenizerManager, weight_version: str, update: OpenUpdate | None
) -> None:
    """``update`` was committed, or, where it is None, a rollback was.

    Upstream's ``_update_model_path_info`` takes the path of a checkpoint for the served
    model's name too. Clients name their model in each request, and look for it in
    ``/v1/models``: the name stays.
    """
    tokenizer_manager._update_weight_version_if_provided(weight_version)
    if update is None:
        return
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
