"""Exchanges of changed elements and of whole copies, in the device's memory."""

from __future__ import annotations

from benchmarks.gpu.exchanges import SHARES, measure_changes, measure_copies
from benchmarks.gpu.step import Step, Values, main
from benchmarks.gpu.weights import models

LIMIT_S = 120
WHOLE = "whole copies"


def names() -> list[str]:
    """Return the name of each part."""
    return [
        f"{model}, {what}"
        for model in models(small=False)
        for what in (*(f"{share:.1%} changed" for share in SHARES), WHOLE)
    ]


def run(step: Step) -> None:
    rate = step.found("bandwidth", "copy").get("copy_bytes_per_s")
    for model, sizes in models(small=step.small).items():
        for share in SHARES:
            with step.part(f"{model}, {share:.1%} changed") as values:
                measure_changes(values, sizes, share)
                compare(values, rate)
        with step.part(f"{model}, {WHOLE}") as values:
            measure_copies(values, sizes)
            compare(values, rate)


def compare(values: Values, rate: float | None) -> None:
    """Put the limit at ``rate`` bytes per second beside the time, if the rate is known.

    Scattered elements share sectors with others, which come along.
    """
    if rate is None:
        return
    values["exchange_ms_limit"] = values["moved_bytes"] / rate * 1e3
    if "sectors_bytes" in values:
        in_sectors = values["sectors_bytes"] / rate * 1e3
        values["copy_bandwidth_share_in_sectors"] = in_sectors / values["exchange_ms"]


if __name__ == "__main__":
    main("exchange", "Exchanges in the card's memory", names(), run)
