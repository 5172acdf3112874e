"""The price and the worth of a bound on the age of KV, while a model learns.

``examples.async_grpo`` trains a small model in flight. Each update brings a bound, ``kv_max_age``:
KV that is older is recomputed, and no later request finds it. With several turns a question comes
after a conversation, whose KV the server has cached under earlier versions.

    at once   all requests over the bound are recomputed at the commit
    hard      they wait, and a step recomputes at most ``budget`` tokens
    soft      the same, and they go on with old KV until their turn

``prefilled`` are tokens of all prefills, for each token made. ``off`` is the distance of a sampled
token's log-probability from that with KV of its own weights alone. ``ratio's variance`` is what
this distance adds to a trainer's importance ratios.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from anyio.from_thread import start_blocking_portal

from benchmarks.common import options
from benchmarks.common.report import Report, Summary
from examples.async_grpo.__main__ import SERVER
from examples.async_grpo.model import TEACHING_STEPS, Base, base_model
from examples.async_grpo.run import Result, Settings, run
from examples.async_grpo.ways import keeping_kv
from examples.ending import exit_at_sigterm
from examples.stories.server import start_server
from sglang_inflight.cache import default_cache

ANY = "any"
AT_ONCE, HARD, SOFT = "at once", "hard", "soft"
# room for the conversations of all running requests
TOKENS = 131072


def main(
    turns: Annotated[str, typer.Option(help="questions of a conversation, several with ,")] = "1,3",
    bounds: Annotated[str, typer.Option(help="kv_max_age; any for none")] = "0,1,2,4,8,any",
    budgeted: Annotated[str, typer.Option(help="bounds that run with a budget, too")] = "0,1,2",
    budget: Annotated[int, typer.Option(min=1, help="tokens of a step")] = 256,
    seconds: Annotated[float, typer.Option(help="of each run")] = 45.0,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 3,
    teaching: Annotated[int, typer.Option(min=1, help="steps of the base model")] = TEACHING_STEPS,
    json: options.Json = None,
) -> None:
    """Prefills, throughput and the error of log-probabilities, by the bound on KV's age."""
    report = Report(
        "kv_age",
        ("turns", "way", "kv_max_age", "prefilled per token", "tokens/s", "steps", "reward",
         "off, mean", "off, p99", "ratio's variance", "stood still, %"),
        {
            "turns": turns, "bounds": bounds, "budgeted": budgeted, "budget": budget,
            "seconds": seconds, "seeds": seeds, "teaching": teaching,
        },
        notes=[
            "prefilled per token: tokens of all prefills over tokens made. off: distance of "
            "sampled log-probabilities from those with KV of the same version.",
            f"at once: recomputed at the commit. hard and soft: at most {budget} tokens in a step; "
            "until their turn hard requests wait, and soft ones go on with old KV.",
        ],
    )  # fmt: skip
    # a server would outlive a benchmark that is cut
    exit_at_sigterm()
    torch.set_num_threads(1)
    settings = replace(Settings(), seconds=seconds, evaluations=1)
    found: dict[tuple[int, str, str], list[Result]] = defaultdict(list)
    for count in map(int, turns.split(",")):
        base = base_model(default_cache(), lambda done, of: None, steps=teaching, turns=count)
        ways = {AT_ONCE: bounds.split(",")}
        # a conversation makes the long contexts that a budget is for
        if count > 1 and budgeted:
            ways |= {HARD: budgeted.split(","), SOFT: budgeted.split(",")}
        for way, of_way in ways.items():
            with server(base, settings_of(way, budget)) as url:
                for seed in range(seeds):
                    for bound in of_way:
                        found[count, way, bound].append(
                            run(
                                keeping_kv(None if bound == ANY else int(bound)),
                                url,
                                base.model,
                                replace(settings, turns=count),
                                seed=seed,
                                on_progress=lambda done: None,
                            )
                        )
    for (count, way, bound), runs in found.items():
        report.add(turns=count, way=way, bound=bound, **summarize(runs))
    for count in sorted({count for count, _, _ in found}):
        all_kv = found[count, AT_ONCE, ANY]
        none = found[count, AT_ONCE, "0"]
        if all_kv and none:
            add_goals(report, count, all_kv, none)
    report.show()
    report.write(json)


def settings_of(way: str, budget: int) -> dict[str, str]:
    if way == AT_ONCE:
        return {}
    return {
        "SGLANG_INFLIGHT_KV_REFRESH": way,
        "SGLANG_INFLIGHT_KV_REFRESH_TOKENS_PER_STEP": str(budget),
    }


@contextmanager
def server(base: Base, env: Mapping[str, str]) -> Any:
    """Yield the address of a server of the base model."""
    more = (*SERVER, "--max-total-tokens", str(TOKENS))
    with tempfile.TemporaryDirectory() as folder, start_blocking_portal() as portal:
        log = Path(folder) / "server.log"
        started = start_server(base.folder, name="model", version="0", log=log, more=more, env=env)
        with portal.wrap_async_context_manager(started) as served:
            yield served.url


def summarize(runs: list[Result]) -> dict[str, Any]:
    """Return the cells of a kind of run, over its seeds."""
    costs = [each.kv_cost for each in runs if each.kv_cost is not None]
    return {
        "prefilled": Summary.of(each.tokens_prefilled / max(1, each.tokens_made) for each in runs),
        "rate": Summary.of(each.tokens_made / each.seconds for each in runs),
        "steps": Summary.of(len(each.steps) for each in runs),
        "reward": Summary.of(each.curve[-1][2] for each in runs),
        "off": Summary.of(cost.mean for cost in costs),
        "p99": Summary.of(cost.p99 for cost in costs),
        "variance": Summary.of(cost.ratio_variance for cost in costs),
        "still": Summary.of(
            100 * sum(end - begin for begin, end in each.standstills) / each.seconds
            for each in runs
        ),
    }


def add_goals(report: Report, turns: int, kept: list[Result], recomputed: list[Result]) -> None:
    """Add what must hold if the distances measure the age of KV, and nothing else."""

    def off(runs: list[Result]) -> float:
        return mean(each.kv_cost.mean for each in runs if each.kv_cost is not None)

    report.goal(
        f"turns: {turns}: log-probabilities with fresh KV are as computed again, off at most 1e-3",
        off(recomputed),
        at_most=1e-3,
    )
    report.goal(
        f"turns: {turns}: KV of any age is further off than fresh KV, ratio at least 10",
        off(kept) / max(off(recomputed), 1e-9),
        at_least=10,
    )


if __name__ == "__main__":
    typer.run(main)
