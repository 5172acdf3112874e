"""The benchmarks that ``python -m benchmarks`` runs: their order, their options and limits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """One process. ``label`` tells runs of one script apart. ``quick`` is None for a long run only.

    ``limit_s`` and ``quick_limit_s`` are the seconds after which the process is ended. vLLM takes
    half a minute to start, so only some quick runs have it.
    """

    script: str
    full: str
    quick: str | None
    limit_s: int
    quick_limit_s: int = 180
    label: str = ""
    has_quick_vllm: bool = False

    @property
    def name(self) -> str:
        """Return the name of its file of results."""
        return f"{self.script}-{self.label}" if self.label else self.script

    def arguments(self, *, is_quick: bool) -> list[str]:
        options = self.quick if is_quick else self.full
        assert options is not None
        return ["-m", f"benchmarks.{self.script}", *shlex.split(options)]

    def limit(self, *, is_quick: bool) -> int:
        return self.quick_limit_s if is_quick else self.limit_s


# scripts in the order of the page; each sentence says what a script measures, whatever came out
ABOUT = {
    "timeline": "One update, recorded token by token.",
    "throughput": "Tokens per second while nothing is paused or updated.",
    "pause_grant": "Time from a pause to its answer, and to the last token.",
    "update_gap": "Largest gap between two tokens of a stream during an update.",
    "small_tensors": "Steps beside an update of thousands of small tensors.",
    "commit_size": "Time for which a commit holds the scheduler's loop, by model size.",
    "loop_time": "Time on the scheduler's loop at a commit, by the number of changes and modules.",
    "changes": "Memory, commit and staging by the share of elements that an update changes.",
    "sustained": "Tokens per second with an update every two seconds, and memory.",
    "thrown_away": "Tokens that an update throws away, by what it does to running requests.",
    "trainer_death": "Time to the next token after SIGKILL of the trainer amid its update.",
    "front_door": "Short requests while tensors come by value.",
    "sleep": "Release and resume of all memory.",
    "read_checkpoint": "Reading of a checkpoint into the shadow.",
    "kv_age": "Prefills, throughput and wrong log-probabilities by the bound on the age of KV.",
    "parts": "Updates of several servers by a sharded trainer, over links of 100 MB/s.",
}

PLAN = (
    Planned("timeline", "", "--size tiny --quiet 2 --way disk", 900, has_quick_vllm=True),
    Planned(
        "throughput",
        "--sizes tiny --rounds 2 --turns 24 --tokens 128",
        "--sizes tiny --rounds 1 --turns 2",
        3600,
        label="tiny",
    ),
    Planned("throughput", "--sizes 135m --rounds 2 --turns 8", None, 3600, label="135m"),
    Planned(
        "pause_grant",
        "--size 135m --rounds 1 --samples 9",
        "--size tiny --rounds 1 --samples 3",
        3600,
        label="tp1",
    ),
    Planned(
        "pause_grant",
        "--size 135m-even --tp-size 2 --rounds 1 --samples 9",
        "--size tiny-even --tp-size 2 --rounds 1 --samples 3",
        3600,
        label="tp2",
    ),
    Planned(
        "update_gap",
        "--size smollm2 --rounds 1 --updates 2",
        "--size tiny --rounds 1 --updates 1 --way disk",
        3600,
        label="small",
    ),
    Planned("update_gap", "--size 500m --rounds 1 --updates 1", None, 3600, label="500m"),
    Planned("update_gap", "--size 1.5b --rounds 1 --updates 1", None, 3600, label="1.5b"),
    Planned(
        "small_tensors",
        "--rounds 1 --updates 3",
        "--size experts-1k --streams 8 --updates 1",
        1800,
        label="20k",
    ),
    Planned(
        "small_tensors",
        "--size experts-140k --rounds 1 --updates 1 --ways disk,bucket",
        None,
        3600,
        label="140k",
    ),
    Planned(
        "commit_size",
        "--sizes 135m,500m,1.5b --rounds 1 --updates 3",
        "--sizes tiny --rounds 1 --updates 2",
        3600,
    ),
    Planned("loop_time", "--turns 9", "--turns 3", 900),
    Planned(
        "changes",
        "--sizes 135m,1.5b --changed 1,10,100 --rounds 1 --updates 1",
        "--sizes tiny --changed 1,100 --rounds 1 --updates 1",
        5400,
    ),
    Planned(
        "sustained",
        "--rounds 1 --window 8 --windows 6",
        "--size tiny --rounds 1 --window 2 --windows 1 --way disk",
        3600,
    ),
    Planned(
        "thrown_away",
        "--size 135m --rounds 1 --updates 2",
        "--size tiny --rounds 1 --updates 1 --wanted 64",
        3600,
    ),
    Planned(
        "trainer_death",
        "--size 135m --rounds 1 --watch 20",
        "--size tiny --rounds 1 --watch 3 --phases sending",
        3600,
    ),
    Planned("front_door", "--rounds 1", "--rounds 1 --window 2 --windows 1", 1800),
    Planned(
        "sleep",
        "--size 135m --rounds 1 --cycles 3",
        "--size tiny --rounds 1 --cycles 1",
        3600,
    ),
    Planned("read_checkpoint", "--size 1.5b", "--size 135m --turns 3", 1800),
    Planned(
        "kv_age",
        "--turns 1,3 --seeds 3 --seconds 30",
        "--turns 1 --bounds 0,any --seeds 1 --seconds 4 --teaching 2",
        5400,
        quick_limit_s=300,
    ),
    Planned(
        "parts",
        "--size 135m --servers 1,2,4 --updates 5",
        "--size tiny --servers 1,2 --updates 1",
        3600,
        quick_limit_s=300,
    ),
)


def chosen(only: Sequence[str], *, is_quick: bool) -> list[Planned]:
    """Return what is to run. ``only`` has names of scripts or of runs; nothing means all.

    Raises ``ValueError`` for an unknown name.
    """
    runs = [each for each in PLAN if not is_quick or each.quick is not None]
    known = {name for each in runs for name in (each.script, each.name)}
    if unknown := [name for name in only if name not in known]:
        raise ValueError(
            f"no benchmark is named {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    return [each for each in runs if not only or {each.script, each.name} & set(only)]
