"""Where the weights that are served came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager


def note_model_path(tokenizer_manager: TokenizerManager, path: str, load_format: str) -> None:
    """After an update from ``path``.

    Upstream's ``_update_model_path_info`` takes the path for the served model's name too.
    Clients name their model in each request, and look for it in ``/v1/models``: the name
    stays.
    """
    tokenizer_manager.model_path = path
    tokenizer_manager.record_config_updates("tokenizer.update_weights", load_format=load_format)
