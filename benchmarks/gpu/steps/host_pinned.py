"""Exchanges with pinned memory of the host, over the card's link."""

from __future__ import annotations

from benchmarks.gpu.card import need_card
from benchmarks.gpu.exchanges import measure_changes, measure_copies
from benchmarks.gpu.step import Step, Values, main
from benchmarks.gpu.weights import models

LIMIT_S = 120
SHARES = (0.01, 0.1)
WHOLE = "whole copies on the host"


def names() -> list[str]:
    """Return the name of each part."""
    return [
        f"{model}, {what}"
        for model in models(small=False)
        for what in (*(f"{share:.1%} changed, on the host" for share in SHARES), WHOLE)
    ]


def run(step: Step) -> None:
    link = step.found("bandwidth", "link")
    for model, sizes in models(small=step.small).items():
        for share in SHARES:
            with step.part(f"{model}, {share:.1%} changed, on the host") as values:
                need_card()
                measure_changes(values, sizes, share, on_host=True)
                compare(values, link, values["changes_bytes"], values["values_bytes"])
        with step.part(f"{model}, {WHOLE}") as values:
            need_card()
            measure_copies(values, sizes, on_host=True)
            compare(values, link, sizes.nbytes, sizes.nbytes)


def compare(values: Values, link: Values, to_card: int, from_card: int) -> None:
    """Put the limit of the link beside the time, if it is known: both directions at once."""
    if "both_ways_bytes_per_s" not in link:
        return
    ways = to_card / link["to_card_bytes_per_s"], from_card / link["from_card_bytes_per_s"]
    both = (to_card + from_card) / link["both_ways_bytes_per_s"]
    values["exchange_ms_limit"] = max(*ways, both) * 1e3


if __name__ == "__main__":
    main("host_pinned", "Exchanges with the host's memory", names(), run)
