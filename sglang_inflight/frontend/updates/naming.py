"""Another name for the weights that are in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

from sglang_inflight.frontend.bodies import NameBody

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager


async def name_version(tokenizer_manager: TokenizerManager, body: NameBody) -> dict[str, Any]:
    """Tokens that come from now on have the new name, and the epoch that they had."""
    if body.abort_all_requests:
        tokenizer_manager.abort_request(abort_all=True)
    await tokenizer_manager.update_weight_version(
        UpdateWeightVersionReqInput(new_version=body.new_version)
    )
    return {
        "success": True,
        "message": f"Weight version updated to {body.new_version}",
        "new_version": body.new_version,
    }
