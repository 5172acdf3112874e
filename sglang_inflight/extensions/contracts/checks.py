"""Checks of version contracts that this server cannot keep, and of ``max_version_lag``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.extensions.contracts.version_waits import demands_of
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import AT_THE_DOOR, MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_count
from sglang_inflight.sglang_types import get_disagg, get_exec
from sglang_inflight.vocabulary.contracts import MAX_VERSION_LAG, read_contract
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@AT_THE_DOOR.join(order=25)
def check_demands(_: object, asked: Asked) -> None:
    """Raise ``Refused`` for a wrong contract, and for one that cannot be kept here."""
    for contract, adapter in demands_of(asked):
        if contract.min_epoch is not None and get_disagg().disaggregation_mode != "null":
            raise Refused(
                "min_epoch: the two servers of a pair (--disaggregation-mode) count epochs of "
                "their own; use min_weight_version or exact_weight_version"
            )
        if contract.is_about_adapter and adapter is None:
            raise Refused(
                "min_adapter_version and exact_adapter_version need a request with an adapter"
            )


@PARAMETERS.join(order=40)
def check_max_version_lag(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a value that is no whole number, 0 or more.

    Raise also if this server runs without us: no scheduler would enforce the limit.
    """
    read_count(params, MAX_VERSION_LAG)


@MESSAGE.join(order=40)
def require_keepable(_: object, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request has a contract, and no scheduler can see to it."""
    contract = read_contract(prompt.message.sampling_params.custom_params)
    if contract is not None and get_exec().dllm.dllm_algorithm is not None:
        raise ValueError(
            "a version contract is not possible with --dllm-algorithm: its requests wait in queues "
            "of their own, where no commit ends them"
        )
