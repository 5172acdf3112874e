"""The real server, with 16 streams, updated in each form of staging: are the labels right?

A token names the weights that made it. So a label is compared with the token itself.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.gpu.marked import SMALL, TINY, Marked
from benchmarks.gpu.servers import (
    Stream,
    digest,
    end_streams,
    expect_graphs,
    label_values,
    serving,
    start_streams,
    started,
)
from benchmarks.gpu.step import Step, Values, main
from harness.server import Server
from tests.support.load import more_tokens, status, update, versions_of
from tests.support.updates import (
    LIVE,
    expect_served,
    refuse,
    succeed,
    tensor_body,
)
from tests.support.updates import (
    serving as served,
)

LIMIT_S = 180
TENSOR = "/update_weights_from_tensor"
FORMS = ("changes", "device", "host", "off")
LOOPS: dict[str, tuple[str, ...]] = {
    "overlap": (),
    "no overlap": ("--disable-overlap-schedule",),
}
PARTS = [f"{form}, {loop}" for form in FORMS for loop in LOOPS]
_NOT_A_NUMBER = "model.layers.1.mlp.up_proj.weight"


def run(step: Step) -> None:
    model = TINY if step.small else SMALL
    digests: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in range(3):
            model.build(folder / f"v{version}", version)
        starts = {
            f"{form}, {loop}": functools.partial(
                serving,
                folder / "v0",
                *flags,
                log=step.logs / f"{form}, {loop}.log",
                env={"SGLANG_INFLIGHT_STAGING": form},
            )
            for form in FORMS
            for loop, flags in LOOPS.items()
        }
        with started(starts) as server_of:
            for part in PARTS:
                with step.part(part) as values, server_of(part) as server:
                    form = part.partition(",")[0]
                    _Run(server, model, folder, form, digests, values).check()


class _Run:
    """One server, and everything that is asked of it. ``digests`` are those of all servers."""

    def __init__(
        self,
        server: Server,
        model: Marked,
        folder: Path,
        form: str,
        digests: dict[int, str],
        values: Values,
    ) -> None:
        self._server = server
        self._model = model
        self._folder = folder
        self._form = form
        self._digests = digests
        self._values = values
        self._stalls: list[float] = []
        self._streams: list[Stream] = []

    def check(self) -> None:
        self._streams = start_streams(self._server)
        expected = ["v0", "v1", "v2"]
        self._from_disk(1)
        self._from_tensors(2)
        if self._form != "off":
            # in place there is nothing to return to, and a failure leaves half of the weights
            self._roll_back()
            self._from_disk(2)
            self._drop()
            self._refuse_nan()
            expected += ["v1", "v2"]
        expect_graphs(self._server)
        outputs = end_streams(self._streams)
        self._values |= label_values(outputs)
        self._values["stall_ms"] = statistics.median(self._stalls)
        self._values["stall_ms_n"] = len(self._stalls)
        for output in outputs:
            if versions_of(output) != expected:
                raise AssertionError(f"a stream has {versions_of(output)}, expected {expected}")
        checked = "digests, a refused NaN"
        if self._form == "off":
            self._refuse_nan_and_mend()
            checked += ", the repair after it"
        else:
            checked += ", a rollback, a dropped update"
        self._values["checked"] = checked

    def _from_disk(self, version: int) -> None:
        self._note(update(self._server, self._folder, version, **LIVE), version)

    def _from_tensors(self, version: int) -> None:
        body = tensor_body(self._model.tensors(version), weight_version=f"v{version}", **LIVE)
        self._note(succeed(self._server.post(TENSOR, body)), version)

    def _note(self, receipt: Values, version: int) -> None:
        form = receipt["staged_as"]["form"]
        if form != self._form:
            raise AssertionError(f"staged as {form}: {receipt['staged_as']['why']}")
        self._stalls.append(receipt["stall_ms"])
        self._expect_digest(version)
        more_tokens(list(self._streams))

    def _expect_digest(self, version: int) -> None:
        """Equal weights have equal digests, from every source and in every form."""
        found = digest(self._server)
        if self._digests.setdefault(version, found) != found:
            raise AssertionError(f"v{version} has the digest {found}, and had another one before")

    def _roll_back(self) -> None:
        succeed(self._server.post("/inflight/rollback", {"kv_cache": "fence"}))
        self._expect_digest(1)
        more_tokens(list(self._streams))

    def _drop(self) -> None:
        before = served(self._server)
        session = succeed(self._server.post("/begin_weight_update", {"non_blocking": True}))
        piece = tensor_body(self._model.tensors(1), session_id=session["session_id"])
        succeed(self._server.post(TENSOR, piece))
        more_tokens(list(self._streams))
        succeed(self._server.post("/abort_weight_update", {"session_id": session["session_id"]}))
        self._expect_unchanged(before, "a dropped update")

    def _refuse_nan(self) -> None:
        before = served(self._server)
        refuse(self._server.post(TENSOR, self._with_nan()), _NOT_A_NUMBER)
        self._expect_unchanged(before, "a refused NaN")

    def _refuse_nan_and_mend(self) -> None:
        refuse(self._server.post(TENSOR, self._with_nan()), _NOT_A_NUMBER)
        if not status(self._server)["staging"]["dirty"]:
            raise AssertionError("half of the weights are written, and the server serves them")
        update(self._server, self._folder, 1, **LIVE)
        expect_served(self._server, 1)

    def _with_nan(self) -> Values:
        weights = self._model.tensors(1)
        weights[_NOT_A_NUMBER][0, 0] = math.nan
        return tensor_body(weights, **LIVE)

    def _expect_unchanged(self, before: object, cause: str) -> None:
        if served(self._server) != before:
            raise AssertionError(f"{cause} has changed what is served")
        more_tokens(list(self._streams))


if __name__ == "__main__":
    main("server", "Updates under 16 streams, in each form of staging", PARTS, run)
