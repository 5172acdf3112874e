"""Checks of a request's script, at the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.extensions.replay import SCRIPT
from sglang_inflight.extensions.replay.script import read_script
from sglang_inflight.extensions.trails import RECORD
from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_if_active
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@PARAMETERS.join(order=55)
def check_script(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a wrong script, or one without a record."""
    script = read_if_active(params, SCRIPT)
    if script is None:
        return
    try:
        read_script(script)
    except ValueError as error:
        raise ValueError(f"custom_params.{SCRIPT}: {error}") from error
    if custom_param(params, RECORD) is None:
        raise ValueError(f'custom_params.{SCRIPT} needs {RECORD}: "replay"')


@MESSAGE.join(order=64)
def require_one_replica(_: object, prompt: Prompt) -> None:
    """Raise ``ValueError`` where a pause at a token would stop some ranks alone."""
    if custom_param(prompt.message.sampling_params, SCRIPT) is None:
        return
    parallel = get_parallel()
    if parallel.dp_size > 1 or parallel.attn_dp_enabled:
        raise ValueError(
            f"custom_params.{SCRIPT} is not possible with --dp-size above 1, or with attention DP: "
            "replay on a server of one replica"
        )
