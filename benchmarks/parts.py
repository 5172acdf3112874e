"""Updates of several servers by a sharded trainer: parts, with and without relays, and broadcasts.

Three ways send the same versions in turn, from the same two ranks of a trainer:

    relays       each rank sends its parts once, and the servers hand them on (``ShardSender``)
    direct       each rank sends its parts to every server
    broadcast    rank 0 gathers whole tensors and broadcasts them (``Sender``)

Each rank and each server is a process behind a link of its own, held to the same rate in both
directions (``common/links.py``): on one machine's loopback a copy more would cost nothing. The
links also count what a process sends and receives, whatever it says itself. They need root, and
``ip`` and ``tc``; without, nothing is measured.

Servers have one rank each, so each keeps whole tensors, and a broadcast brings it nothing that it
does not keep. They serve no requests: staging is not paced, and the wire decides as far as the
processors allow. ``processors`` says how many of them were busy. Every receipt's digest is compared
with that of a server which has loaded the same checkpoint at its start.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import psutil
import torch
import typer

from benchmarks.common import models, options
from benchmarks.common.links import INTERFACE, Link, NoLinks, links
from benchmarks.common.report import Report, Summary
from benchmarks.common.sharded_trainer import ShardedTrainer, Way, sharded_trainer
from examples.ending import exit_at_sigterm
from harness.server import IN_A_FORK, Server, serve
from sglang_inflight.client import Client
from sglang_inflight.client.shard_sender import BUCKET_BYTES
from sglang_inflight.vocabulary.shards import Shards, read_shards

TRAINERS = 2
# share of the elements that changes from one version to the next
CHANGED = 0.5
# nothing is forked, and each server's imports take a processor
STARTS_AT_ONCE = 2
CARRIED_BYTES = 64 << 20
_RECEIVED = re.compile(r"^sglang:inflight_received_parts_bytes_total(?:\{[^}]*\})? (\S+)$", re.M)


@dataclass
class Served:
    """A server, and its link."""

    server: Server
    link: Link

    @property
    def url(self) -> str:
        return f"http://{self.link.address}:{self.server.url.rpartition(':')[2]}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60).raise_for_status()

    def digest_of_loaded(self) -> str:
        """Return the digest of the weights as they are: of a version that brings no tensor."""
        with Client(self.url) as client, client.session(partial=True) as session:
            pass
        assert session.receipt is not None
        return session.receipt.ranks[0].digest

    def received(self) -> float:
        """Return the bytes of parts that have come, by the server's metric."""
        return sum(map(float, _RECEIVED.findall(self.get("/metrics/").text)))

    def kept_bytes(self) -> int:
        """Return the bytes of what the rank uses of the checkpoint."""
        (rank,) = self.get("/inflight/plan").json()["ranks"]
        used = read_shards(Shards(rank["digest"], base64.b64decode(rank["lines"])))
        return sum(
            held.regions[0].numel * getattr(torch, held.dtype).itemsize for held in used.values()
        )


@dataclass
class Found:
    """Updates of a number of servers by one way. Bytes are shares of the weights."""

    seconds: list[float] = field(default_factory=list)
    # bytes that came to the server that received most: by its metric, and by its link
    received: list[float] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)
    # bytes that left all ranks of the trainer, and the server that sent most
    trainer_sent: list[float] = field(default_factory=list)
    server_sent: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)


def main(
    size: options.Size = "135m",
    servers: Annotated[str, typer.Option(help="numbers of servers, with commas between")] = "1,2,4",
    updates: Annotated[int, typer.Option(min=1, help="of each way, after a first one")] = 5,
    rate: Annotated[float, typer.Option(help="MB/s of each link")] = 100,
    json: options.Json = None,
) -> None:
    """Seconds and bytes of an update of several servers by a trainer of two ranks."""
    exit_at_sigterm()
    counts = sorted({int(count) for count in servers.split(",")})
    bytes_per_s = 1e6 * rate
    found: dict[tuple[int, Way], Found] = defaultdict(Found)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            links(TRAINERS + counts[-1], bytes_per_s) as made,
        ):
            checkpoints = _build(Path(folder), size)
            of_trainer, of_servers = made[:TRAINERS], made[TRAINERS:]
            with (
                _served(of_servers, checkpoints, Path(folder)) as (fleet, fresh),
                sharded_trainer(of_trainer, checkpoints) as trainer,
            ):
                carried = [CARRIED_BYTES / trainer.carry(CARRIED_BYTES) for _ in range(3)]
                run = _Run(trainer, of_trainer, fresh)
                for count in counts:
                    run.measure(fleet[:count], updates, found)
            nbytes = models.bytes_of(checkpoints[0])
    except NoLinks as error:
        sys.exit(f"nothing was measured: {error}.")
    report = report_of(found, counts, nbytes, bytes_per_s, max(carried))
    report.options |= {"size": size, "servers": servers, "updates": updates, "rate": rate}
    report.facts = {"model_bytes": {size: nbytes}}
    report.show()
    report.write(json)


def report_of(
    found: Mapping[tuple[int, Way], Found],
    counts: Sequence[int],
    nbytes: int,
    bytes_per_s: float,
    carried: float,
) -> Report:
    """Return the report, of weights of ``nbytes``. ``carried``: a link's measured bytes/s."""
    bucket_s = BUCKET_BYTES / bytes_per_s
    report = Report(
        "parts",
        ("servers", "way", "update, s", "the wire alone, s", "received over kept, metric",
         "received over kept, link", "trainer sent, copies", "a server sent, copies",
         "processors"),
        {},
        notes=[
            f"Each of {TRAINERS} ranks of the trainer and each server has a link of "
            f"{bytes_per_s / 1e6:g} MB/s in each direction, headers included. One piece of "
            f"{CARRIED_BYTES / 1e6:.0f} MB went from rank to rank at {carried / 1e6:.0f} MB/s at "
            "best.",
            f"A bucket of parts has {BUCKET_BYTES / 1e6:.1f} MB, which take {bucket_s:.3f} s.",
            "the wire alone: of the busiest link, and with relays a bucket for each server after "
            "the first. Of broadcasts as if one copy reached all servers at once.",
            "received: by the server that received most, over the bytes of the checkpoint that it "
            "uses. The link counts headers, calls and the answers of those it sends to, too.",
            "copies: bytes that left all ranks of the trainer, and the server that sent most, in "
            "copies of the weights. A broadcast's gathering is sent by both ranks.",
            f"processors: how many of {os.cpu_count()} were busy during the update.",
            "Servers have no requests, so staging is not paced. Each receipt had the digest of a "
            "server that loaded the same checkpoint at its start.",
        ],
    )  # fmt: skip
    medians: dict[tuple[int, Way], float] = {}
    for (count, way), it in sorted(found.items(), key=lambda each: each[0][0]):
        medians[count, way] = Summary.of(it.seconds).median
        report.add(
            servers=count,
            way=way,
            seconds=Summary.of(it.seconds),
            wire_s=wire_s(way, count, nbytes, bytes_per_s),
            received=None if way == "broadcast" else Summary.of(it.received),
            carried=Summary.of(it.carried),
            trainer_sent=Summary.of(it.trainer_sent),
            server_sent=Summary.of(it.server_sent),
            processors=Summary.of(it.processors),
        )
    for count in counts:
        it = found[count, "relays"]
        for counter, most in (("metric", max(it.received)), ("link", max(it.carried))):
            report.goal(
                f"{_number_of(count)}, relays: received over kept by the {counter}, at most 1.05",
                most,
                at_most=1.05,
            )
        report.goal(
            f"{_number_of(count)}, relays: copies that the trainer sent, at most 1.05",
            max(it.trainer_sent),
            at_most=1.05,
        )
        for way in ("direct", "broadcast"):
            # for one server both ways of parts are the same
            if (count, way) != (1, "direct"):
                report.goal(
                    f"{_number_of(count)}: update by relays over {way}, at most 1",
                    medians[count, "relays"] / medians[count, way],
                    at_most=1,
                )
    first, last = counts[0], counts[-1]
    if last > first:
        added_s = (medians[last, "relays"] - medians[first, "relays"]) / (last - first)
        report.goal(
            "relays: what each further server adds, in buckets, at most 2",
            added_s / bucket_s,
            at_most=2,
        )
    return report


def _number_of(servers: int) -> str:
    return "1 server" if servers == 1 else f"{servers} servers"


def wire_s(way: Way, servers: int, nbytes: int, bytes_per_s: float) -> float:
    """Return the seconds that an update cannot be below, by the bytes on the busiest link."""
    match way:
        case "relays":
            carried = nbytes + (servers - 1) * min(BUCKET_BYTES, nbytes // TRAINERS)
        case "direct":
            carried = max(nbytes, servers * nbytes // TRAINERS)
        case "broadcast":
            # tensors are gathered, and then sent
            carried = nbytes * (TRAINERS - 1) // TRAINERS + nbytes
    return carried / bytes_per_s


@dataclass
class _Run:
    trainer: ShardedTrainer
    of_trainer: Sequence[Link]
    # digests of the checkpoints, each from a server that loaded it at its start
    fresh: Sequence[str]
    _count: int = 0

    def measure(
        self, fleet: Sequence[Served], updates: int, found: Mapping[tuple[int, Way], Found]
    ) -> None:
        """Send versions to ``fleet`` by each way in turn. The first one of each is not counted."""
        self.trainer.join([served.url for served in fleet])
        for number in range(updates + 1):
            for way in get_args(Way):
                self._update(fleet, way, found[len(fleet), way] if number else Found())

    def _update(self, fleet: Sequence[Served], way: Way, found: Found) -> None:
        self._count += 1
        checkpoint = self._count % len(self.fresh)
        received = [served.received() for served in fleet]
        sent, came = self._carried(fleet)
        busy, began = _busy_s(), time.perf_counter()
        update = self.trainer.send(way, checkpoint, f"v{self._count}")
        busy, seconds = _busy_s() - busy, time.perf_counter() - began
        sent_after, came_after = self._carried(fleet)
        if {*update.digests.values()} != {self.fresh[checkpoint]}:
            raise AssertionError(f"{way}: {update.digests}, and a fresh load: {self.fresh}")
        kept = [served.kept_bytes() for served in fleet]
        ranks = len(self.of_trainer)
        moved = [after - before for before, after in zip(sent, sent_after, strict=True)]
        arrived = [after - before for before, after in zip(came, came_after, strict=True)][ranks:]
        parts = [served.received() - before for served, before in zip(fleet, received, strict=True)]
        found.seconds.append(update.seconds)
        found.received.append(max(n / of for n, of in zip(parts, kept, strict=True)))
        found.carried.append(max(n / of for n, of in zip(arrived, kept, strict=True)))
        found.trainer_sent.append(sum(moved[:ranks]) / max(kept))
        found.server_sent.append(max(moved[ranks:]) / max(kept))
        found.processors.append(busy / seconds)

    def _carried(self, fleet: Sequence[Served]) -> tuple[list[int], list[int]]:
        """Return what each rank of the trainer and then each server has sent and received."""
        both = [link.carried() for link in (*self.of_trainer, *(one.link for one in fleet))]
        return [sent for sent, _ in both], [came for _, came in both]


def _busy_s() -> float:
    """Return the seconds of all processors that were not idle."""
    spent: Any = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq)


def _build(folder: Path, size: str) -> list[Path]:
    """Build two checkpoints of one model."""
    (folder / "a").mkdir()
    first = models.build(folder / "a", size)
    return [first, models.build_changed(first, folder / "b", CHANGED)]


@contextmanager
def _served(
    of_servers: Sequence[Link], checkpoints: Sequence[Path], folder: Path
) -> Iterator[tuple[list[Served], list[str]]]:
    """Start a server behind each link. Return them, and the digest of each checkpoint.

    The last server begins with the second checkpoint, the others with the first one. A single
    server is preceded by another one, for the digest.
    """
    with ExitStack() as stack:
        if len(of_servers) == 1:
            with ExitStack() as before:
                second = _start(before, of_servers[0], checkpoints[1], folder).digest_of_loaded()
        places = range(len(of_servers))
        models_of = [checkpoints[place > 0 and place == places[-1]] for place in places]
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            starts = [
                pool.submit(_start, stack, link, model, folder)
                for link, model in zip(of_servers, models_of, strict=True)
            ]
        fleet = [start.result() for start in starts]
        if len(of_servers) > 1:
            second = fleet[-1].digest_of_loaded()
        yield fleet, [fleet[0].digest_of_loaded(), second]


def _start(stack: ExitStack, link: Link, model: Path, folder: Path) -> Served:
    """Start a server behind ``link``: a fork would be in its zygote's network."""
    log = folder / f"{link.address}.log"
    flags = ("--host", "0.0.0.0", "--enable-metrics", "--max-total-tokens", "4096",
             "--max-running-requests", "4")  # fmt: skip
    # SGLang would look for the address by a default route, and there is none
    env = {"GLOO_SOCKET_IFNAME": INTERFACE, "SGLANG_HOST_IP": link.address}
    with link.inside():
        one = serve(model, *flags, log=log, env=env, fresh=True, command=IN_A_FORK)
        return Served(stack.enter_context(one), link)


if __name__ == "__main__":
    typer.run(main)
