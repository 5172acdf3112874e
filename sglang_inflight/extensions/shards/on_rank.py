"""A rank's calls about the parts of tensors that it uses."""

from __future__ import annotations

from typing import Any

from sglang_inflight.extensions.shards.describing import Describing
from sglang_inflight.extensions.shards.messages import DescribedParts, DescribePartsCall
from sglang_inflight.messages import InflightCall
from sglang_inflight.scheduler.controller import CALLS, PARTS, Controller, Handler
from sglang_inflight.topology import own_index


@PARTS.join()
def make_describing(_: Controller) -> Describing:
    return Describing()


@CALLS.join()
def handlers_of_shards(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    describing, models = controller.part(Describing), controller.staging_parts.models

    def describe(call: DescribePartsCall) -> None:
        def job() -> DescribedParts:
            digest, lines = describing.of(models)
            known = digest in call.known
            return DescribedParts(index=own_index(), digest=digest, lines=None if known else lines)

        controller.staging.when_idle(call, job)

    return {DescribePartsCall: describe}
