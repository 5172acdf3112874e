"""A model of weight updates at scale: ``python -m benchmarks.scale [--write]``.

It says how long an update of a model of 7B to 1T parameters stalls generation, how long it is
staged, which memory it takes, and how old tokens are by then, on nodes of 8 H100s. It computes, and
measures nothing. Each constant says where it is from, and whether anybody has measured it.

Without ``--write`` the tables are printed. With it, they take the place of those in
``docs/scale.md``, so the page cannot say anything else than the code.

Bytes are bytes, a GB is 1e9 of them, and times are seconds. A card is one GPU.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
GB, TB = 1e9, 1e12
MIB, GIB = 1 << 20, 1 << 30
# shares of elements that an update changes, in the tables
SHARES = (0.001, 0.01, 0.03, 0.1)
# the share of one step of RL, where a table has one share
ONE_STEP = 0.01
# a card reads and writes whole sectors
SECTOR_BYTES = 32
FILE_WIDTH = 200
NO_ROOM = "does not fit"
TRANSPORT = "transport"
# the project's goal for the staging of every deployment
GOAL_S = 2.0


class Status(enum.StrEnum):
    MEASURED = "measured by us"
    PUBLISHED = "published"
    ASSUMED = "unmeasured (assumed)"
    # exact, because this package's code says so
    SET = "set by our code"


@dataclass(frozen=True)
class Constant:
    """A number of the model.

    ``unit``: its unit. ``source``: a URL or a file of this repository, with its date, and how the
    value follows from it. ``settled_by``: the step of the GPU kit that measures it, if one does,
    and the key or part there: "step: key".
    """

    value: float
    unit: str
    source: str
    status: Status
    settled_by: str = ""


_SHEET = "NVIDIA, https://www.nvidia.com/en-us/data-center/h100/, H100 SXM"
_NVBANDWIDTH = "https://github.com/NVIDIA/nvbandwidth/issues/24 (2024-09-11), H100"


@dataclass(frozen=True)
class Machine:
    """A node. Rates are of one card, and of one direction where a link has two."""

    name: str
    cards_per_node: Constant
    card: Constant
    static_share: Constant
    memory: Constant
    copy_share: Constant
    scatter_share: Constant
    link: Constant
    to_card: Constant
    from_card: Constant
    kernel_to_card: Constant
    kernel_from_card: Constant
    nvlink: Constant
    nic: Constant

    @property
    def copies(self) -> float:
        """Bytes per second that a copy within the card's memory reads and writes."""
        return self.memory.value * self.copy_share.value

    @property
    def scattered(self) -> float:
        """Bytes per second of whole sectors that an exchange of single elements touches."""
        return self.copies * self.scatter_share.value


H100 = Machine(
    name="8x H100 SXM",
    cards_per_node=Constant(8, "cards", f"{_SHEET}, HGX", Status.PUBLISHED),
    card=Constant(80 * GB, "B", _SHEET, Status.PUBLISHED, "bandwidth: memory_bytes"),
    static_share=Constant(
        0.82,
        "of the card",
        "SGLang 0.5.23, arg_groups/memory_hook.py, for an H100: 0.812 at TP 8, 0.829 at TP 1",
        Status.PUBLISHED,
        "memory: tokens of KV",
    ),
    memory=Constant(3.35 * TB, "B/s", _SHEET, Status.PUBLISHED, "bandwidth: copy_bytes_per_s"),
    copy_share=Constant(
        0.9,
        "of memory",
        "assumed; 0.93 on an H100 PCIe: https://news.ycombinator.com/item?id=45236545 (2025-09)",
        Status.ASSUMED,
        "bandwidth: copy_bytes_per_s",
    ),
    scatter_share=Constant(
        0.5,
        "of copies",
        "assumed; nothing published was found",
        Status.ASSUMED,
        "exchange: copy_bandwidth_share_in_sectors",
    ),
    link=Constant(
        64 * GB,
        "B/s",
        f"{_SHEET}, PCIe Gen5 x16",
        Status.PUBLISHED,
        "bandwidth: both_ways_bytes_per_s",
    ),
    to_card=Constant(
        55.6 * GB,
        "B/s",
        "nvbandwidth's host_to_device_memcpy_ce in https://dev.smart-guide.co.kr/en/tutorial/"
        "nvidia-nvbandwidth-measure-gpu-interconnect-performance-tutorial/ (read 2026-11), without "
        "the card's name; stitch's pauses imply 52 to 55",
        Status.PUBLISHED,
        "bandwidth: to_card_bytes_per_s",
    ),
    from_card=Constant(
        52.8 * GB,
        "B/s",
        f"{_NVBANDWIDTH}, device_to_host_memcpy_sm",
        Status.PUBLISHED,
        "bandwidth: from_card_bytes_per_s",
    ),
    kernel_to_card=Constant(
        35.2 * GB,
        "B/s",
        f"{_NVBANDWIDTH}, host_to_device_memcpy_sm",
        Status.PUBLISHED,
        "host_pinned: exchange_ms of changes",
    ),
    kernel_from_card=Constant(
        52.8 * GB,
        "B/s",
        f"{_NVBANDWIDTH}, device_to_host_memcpy_sm",
        Status.PUBLISHED,
        "host_pinned: exchange_ms of changes",
    ),
    nvlink=Constant(450 * GB, "B/s", f"{_SHEET}, 900 GB/s both ways", Status.PUBLISHED),
    nic=Constant(
        50 * GB,
        "B/s",
        "DGX H100: 8x 400 Gb/s, https://docs.nvidia.com/dgx/dgxh100-user-guide/",
        Status.PUBLISHED,
    ),
)
# A peer's card. Only its NVLink differs here.
H800 = replace(
    H100,
    name="8x H800",
    nvlink=Constant(
        160 * GB, "B/s", "https://arxiv.org/abs/2412.19437 (2024-12)", Status.PUBLISHED
    ),
)
_RESULTS = "benchmarks/RESULTS.md"
_RUN = "(2026-11-26, commit 1eaad6a)"
_SMALL_TENSORS = f"{_RESULTS}, small_tensors {_RUN}, 2 cores without a GPU"
_CHECKPOINT_ENGINE = (
    "https://github.com/MoonshotAI/checkpoint-engine/releases/tag/v0.2.0 (read 2026-11)"
)
_MILES = "https://github.com/radixark/miles/pull/976 (2026-04-13), p2p-weight-transfer.md"


@dataclass(frozen=True)
class Package:
    """Constants of this package: its settings' defaults, its buffers, and its costs."""

    pace: Constant
    interpreter_share: Constant
    tensor_planned: Constant
    piece: Constant
    tensor_recorded: Constant
    tensor_loaded: Constant
    tensor_at_best: Constant
    reading: Constant
    broadcast: Constant
    hashing: Constant
    readers_at_rest: Constant
    commit: Constant
    launch: Constant
    spare: Constant
    changes_on_card: Constant
    offset: Constant
    buffers: Constant
    bucket: Constant
    rounding: Constant
    remap_handles: Constant
    remap_handle: Constant
    remap_byte: Constant
    remap_drain: Constant


PACKAGE = Package(
    pace=Constant(
        100 * GIB,
        "B/s",
        "docs/reference/settings.md, SGLANG_INFLIGHT_PACE_BYTES_PER_S: a GPU's default, chosen "
        "without a GPU",
        Status.SET,
        "stalls: beside_staging_tokens_per_s, at several paces",
    ),
    interpreter_share=Constant(
        0.25,
        "of a core",
        "docs/reference/settings.md, SGLANG_INFLIGHT_PACE_INTERPRETER",
        Status.SET,
        "stalls: beside_staging_tokens_per_s",
    ),
    tensor_planned=Constant(
        8.0e-6,
        "s a tensor",
        f"{_RESULTS}, small_tensors, 2 cores without a GPU: processor time beside the loop",
        Status.MEASURED,
        "stalls: staged_s",
    ),
    piece=Constant(
        10e-6,
        "s a piece",
        "sglang_inflight/extensions/shards/wire.py (2026-11-28), 2 cores without a GPU: a small "
        "piece is copied to its place in a part",
        Status.MEASURED,
    ),
    tensor_recorded=Constant(
        71e-6,
        "s a tensor",
        "sglang_inflight/scheduler/plans/record.py (2026-11-27), 2 cores without a GPU: a "
        "run of SGLang's loader on tensors without memory",
        Status.MEASURED,
    ),
    tensor_loaded=Constant(
        11.4 / 20_000,
        "s a tensor",
        f"{_SMALL_TENSORS}: 20,000 by the loader in 11.4 s, unpaced, before load plans",
        Status.MEASURED,
    ),
    tensor_at_best=Constant(
        14.36 / 139_500,
        "s a tensor",
        f"{_CHECKPOINT_ENGINE}: Kimi K2 FP8, all of 139,500 tensors in 14.36 s on 16 H20s. So a "
        "loader on such a host takes at most this, without our checks",
        Status.PUBLISHED,
    ),
    reading=Constant(
        3.02 * GB / 1.73,
        "B/s",
        f"{_RESULTS}, read_checkpoint {_RUN}: 1.5B from the page cache, one rank",
        Status.MEASURED,
    ),
    broadcast=Constant(
        43.7 * GB,
        "B/s",
        f"{_MILES}: Qwen3-235B by NCCL, 470 GB in 10.75 s; its other rows have 19 to 43",
        Status.PUBLISHED,
    ),
    hashing=Constant(
        31.5 * GB,
        "B/s",
        "XXH3 by SSE2, https://github.com/Cyan4973/xxHash (an i7-9700K)",
        Status.PUBLISHED,
    ),
    readers_at_rest=Constant(
        4,
        "threads",
        "sglang_inflight/scheduler/update/checks/digest.py: while requests wait",
        Status.SET,
    ),
    commit=Constant(
        1.14e-3,
        "s",
        f"{_RESULTS}, commit_size {_RUN}: 1.5B by pointers, on a CPU",
        Status.MEASURED,
        "exchange: enqueue_ms",
    ),
    launch=Constant(
        5e-6,
        "s a copy",
        "assumed; a launch by torch takes some µs",
        Status.ASSUMED,
        "exchange: enqueue_ms of whole copies",
    ),
    spare=Constant(64 * MIB, "B", "sglang_inflight/scheduler/update/swap.py", Status.SET),
    changes_on_card=Constant(
        0.1,
        "of the weights",
        "docs/reference/settings.md, SGLANG_INFLIGHT_CHANGES_BYTES",
        Status.SET,
    ),
    offset=Constant(
        2,
        "B a changed element",
        "sglang_inflight/scheduler/update/changes/encoding.py; the receipts of "
        f"{_RESULTS}, changes {_RUN}, agree: 0.02 copies at 1 %",
        Status.MEASURED,
        "exchange: changes_bytes",
    ),
    buffers=Constant(
        128 * MIB,
        "B",
        "sglang_inflight/scheduler/groups/groups.py",
        Status.SET,
        "memory: no memory while staging",
    ),
    bucket=Constant(
        16 * MIB, "B", "sglang_inflight/client/shard_sender.py, BUCKET_BYTES", Status.SET
    ),
    rounding=Constant(
        2,
        "at most",
        "docs/guide/staging.md: torch rounds pinned memory of each weight up to a power of two",
        Status.PUBLISHED,
    ),
    remap_handles=Constant(
        64, "handles", "assumed; the kit tries 1 to 256", Status.ASSUMED, "remap: exchange_us"
    ),
    remap_handle=Constant(
        20e-6,
        "s a handle",
        "assumed: unmap, map and set access",
        Status.ASSUMED,
        "remap: exchange_us",
    ),
    remap_byte=Constant(
        0.05e-3 / GB,
        "s a byte",
        "assumed: pages of 2 MiB in the card's tables",
        Status.ASSUMED,
        "remap: exchange_us",
    ),
    remap_drain=Constant(
        1e-3,
        "s",
        "assumed: no kernel may use the pages, so one overlap is lost",
        Status.ASSUMED,
        "remap: exchange_us",
    ),
)


@dataclass(frozen=True)
class Run:
    """The RL run in which updates happen."""

    stream: Constant
    train_step: Constant
    trainer_cards: Constant


RUN = Run(
    stream=Constant(
        50,
        "tokens/s a stream",
        "assumed: steps of 20 ms",
        Status.ASSUMED,
        "stalls: gap_without_update_ms",
    ),
    train_step=Constant(
        60,
        "s",
        "assumed; LlamaRL has 8.9 s for 8B and 59.5 s for 405B, arXiv 2505.24034 (2025-05)",
        Status.ASSUMED,
    ),
    trainer_cards=Constant(
        1,
        "for each card of a server",
        "assumed: each with a network card of its own, and none on the servers' nodes",
        Status.ASSUMED,
    ),
)


class Precision(enum.Enum):
    """Bytes of a quantized parameter, and bytes of an element."""

    BF16 = 2.0, 2
    # blocks of 128 by 128 share a scale of 4 bytes
    FP8 = 1 + 4 / 128**2, 1

    @property
    def parameter_bytes(self) -> float:
        return self.value[0]

    @property
    def element_bytes(self) -> int:
        return self.value[1]


@dataclass(frozen=True)
class Model:
    """A model's shape, from its card and configuration at ``source``.

    ``parameters``: all of them. ``tensors_per_layer``: tensors of a layer in the checkpoint,
    without routed experts; ``matrices_per_layer`` of them are quantized in FP8. ``experts``: routed
    ones in each of ``expert_layers``, each of three matrices of ``hidden`` by ``expert_width``.
    ``finished``: elements of the matrix in each layer that SGLang finishes after loading, in each
    precision (MLA's ``kv_b_proj``).
    """

    name: str
    source: str
    parameters: float
    layers: int
    hidden: int
    vocabulary: int
    tensors_per_layer: int
    matrices_per_layer: int
    experts: int = 0
    expert_layers: int = 0
    expert_width: int = 0
    finished: int = 0

    @property
    def expert_parameters(self) -> float:
        return 3.0 * self.hidden * self.expert_width * self.experts * self.expert_layers

    def expert_bytes(self, precision: Precision) -> float:
        """Bytes of all routed experts."""
        return self.expert_parameters * precision.parameter_bytes

    def other_bytes(self, precision: Precision) -> float:
        """Bytes of everything but routed experts. Embeddings and head stay in bfloat16."""
        kept = 2.0 * self.vocabulary * self.hidden
        quantized = self.parameters - self.expert_parameters - kept
        return quantized * precision.parameter_bytes + kept * 2

    def tensors(self, precision: Precision) -> int:
        """Tensors of the checkpoint; in FP8 each quantized matrix has one more, its scales."""
        of_experts = 3 * self.experts * self.expert_layers
        found = self.layers * self.tensors_per_layer + of_experts + 3
        if precision is Precision.FP8:
            found += self.layers * self.matrices_per_layer + of_experts
        return found


def _at_hub(name: str) -> str:
    return f"https://huggingface.co/{name}"


QWEN_7B = Model("Qwen2.5-7B", _at_hub("Qwen/Qwen2.5-7B"), 7.62e9, 28, 3584, 152064, 12, 7)
QWEN_32B = Model("Qwen3-32B", _at_hub("Qwen/Qwen3-32B"), 32.8e9, 64, 5120, 151936, 11, 7)
LLAMA_70B = Model(
    "Llama-3.1-70B", _at_hub("meta-llama/Llama-3.1-70B"), 70.6e9, 80, 8192, 128256, 9, 7
)
QWEN_30B = Model(
    "Qwen3-30B-A3B",
    _at_hub("Qwen/Qwen3-30B-A3B"),
    30.5e9,
    48,
    2048,
    151936,
    9,
    4,
    experts=128,
    expert_layers=48,
    expert_width=768,
)
QWEN_235B = Model(
    "Qwen3-235B-A22B",
    _at_hub("Qwen/Qwen3-235B-A22B"),
    235e9,
    94,
    4096,
    151936,
    9,
    4,
    experts=128,
    expert_layers=94,
    expert_width=1536,
)
DEEPSEEK = Model(
    "DeepSeek-V3",
    _at_hub("deepseek-ai/DeepSeek-V3"),
    671e9,
    61,
    7168,
    129280,
    14,
    8,
    experts=256,
    expert_layers=58,
    expert_width=2048,
    # a rank of 512; 128 heads, each of 128 for keys and for values
    finished=512 * 128 * 256,
)
KIMI = Model(
    "Kimi K2",
    _at_hub("moonshotai/Kimi-K2-Instruct"),
    1026e9,
    61,
    7168,
    163840,
    14,
    8,
    experts=384,
    expert_layers=60,
    expert_width=2048,
    # the same with 64 heads
    finished=512 * 64 * 256,
)
MODELS = (QWEN_7B, QWEN_32B, LLAMA_70B, QWEN_30B, QWEN_235B, DEEPSEEK, KIMI)


@dataclass(frozen=True)
class Deployment:
    """A replica of ``model`` on ``cards``: experts are spread over all of them.

    ``attention_cards``: cards among which everything else is sharded. With fewer than ``cards``
    each group of them has a whole copy of it (attention DP).
    """

    model: Model
    precision: Precision
    cards: int
    attention_cards: int

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.precision.name}"

    @property
    def layout(self) -> str:
        if not self.model.experts:
            return f"TP {self.cards}"
        groups = self.cards // self.attention_cards
        attention = f"TP {self.attention_cards}" + (f" x DP {groups}" if groups > 1 else "")
        return f"{attention}, EP {self.cards}"

    @property
    def total_bytes(self) -> float:
        """Bytes of the whole model, once."""
        model, precision = self.model, self.precision
        return model.expert_bytes(precision) + model.other_bytes(precision)

    @property
    def card_bytes(self) -> float:
        """Bytes of weights on a card."""
        model, precision = self.model, self.precision
        experts = model.expert_bytes(precision) / self.cards
        return experts + model.other_bytes(precision) / self.attention_cards

    @property
    def elements(self) -> float:
        """Elements on a card, all counted in the width of the precision."""
        return self.card_bytes / self.precision.element_bytes

    @property
    def tensors(self) -> int:
        return self.model.tensors(self.precision)

    @property
    def own_tensors(self) -> float:
        """Tensors of which a card takes a part: its experts, and everything else."""
        of_experts = 3 * self.model.experts * self.model.expert_layers
        if self.precision is Precision.FP8:
            of_experts *= 2
        return self.tensors - of_experts + of_experts / self.cards

    @property
    def taken_bytes(self) -> float:
        """Bytes of the tensors of which a card takes a part: its experts, and everything else."""
        model, precision = self.model, self.precision
        return model.expert_bytes(precision) / self.cards + model.other_bytes(precision)

    @property
    def is_finished(self) -> bool:
        """Whether SGLang may finish the model after loading: it is staged after a proof."""
        return bool(self.model.finished) or self.precision is Precision.FP8

    @property
    def finished_tensors(self) -> int:
        """Tensors that go by the model's loader and are finished: FP8 has one more, the scales.

        A proof finds that finishing leaves everything else as it was loaded, by SGLang's code also
        blocks of FP8 on an H100.
        """
        if not self.model.finished:
            return 0
        return self.model.layers * (2 if self.precision is Precision.FP8 else 1)

    @property
    def finished_bytes(self) -> float:
        """Bytes of a card's part of them."""
        elements = self.model.finished * self.model.layers / self.attention_cards
        return elements * self.precision.parameter_bytes


def _deployments() -> Iterator[Deployment]:
    bf16, fp8 = Precision.BF16, Precision.FP8
    for model, cards in (
        (QWEN_7B, 1),
        (QWEN_32B, 2),
        (LLAMA_70B, 4),
        (QWEN_30B, 4),
        (QWEN_235B, 8),
    ):
        yield Deployment(model, bf16, cards, cards)
        yield Deployment(model, fp8, cards, cards)
    for model, cards in ((DEEPSEEK, 16), (KIMI, 32)):
        # twice the bytes need twice the cards
        yield Deployment(model, bf16, 2 * cards, 8)
        yield Deployment(model, fp8, cards, 8)


DEPLOYMENTS = tuple(_deployments())


class Form(enum.Enum):
    """How an update waits for its commit, and how the commit exchanges it."""

    CHANGES = "changes"
    DEVICE = "device"
    HOST = "host"
    OFF = "off"
    # not of this package on a GPU
    REMAP = "remap"
    POINTERS = "pointers"


@dataclass(frozen=True)
class Moved:
    """Bytes that a commit moves on a card, at least.

    ``memory``: read and written in the card's memory. ``to_card``, ``from_card``: over its link.
    """

    memory: float = 0.0
    to_card: float = 0.0
    from_card: float = 0.0

    def least_s(self, machine: Machine) -> float:
        """Seconds by the data sheet's bandwidths, in which nothing else happens."""
        link = machine.link.value
        return max(self.memory / machine.memory.value, self.to_card / link, self.from_card / link)


def changes_bytes(deployment: Deployment, share: float) -> float:
    """Return the bytes on a card that keep ``share`` of its elements, changed anywhere.

    Values and offsets, or the values of whole ranges where these take less.
    """
    width = deployment.precision.element_bytes
    kept = deployment.elements * share * (width + PACKAGE.offset.value)
    return min(kept, deployment.card_bytes)


def are_on_host(deployment: Deployment, share: float) -> bool:
    """Return whether the changes outgrow their memory on the card."""
    return changes_bytes(deployment, share) > PACKAGE.changes_on_card.value * deployment.card_bytes


def moved(deployment: Deployment, form: Form, share: float) -> Moved:
    """Return what a commit of ``share`` of the elements moves on a card."""
    weights = deployment.card_bytes
    if form is Form.DEVICE:
        # three copies by way of the spare memory, each of which reads and writes
        return Moved(memory=6 * weights)
    if form is Form.HOST:
        return Moved(memory=2 * weights, to_card=weights, from_card=weights)
    if form is not Form.CHANGES:
        return Moved()
    kept = changes_bytes(deployment, share)
    width = deployment.precision.element_bytes
    values = deployment.elements * share * width
    live = 2 * sector_bytes(deployment, share)
    if kept == weights:
        values, live = weights, 2 * weights
    if are_on_host(deployment, share):
        return Moved(memory=live, to_card=kept, from_card=values)
    return Moved(memory=live + kept + values)


def sector_bytes(deployment: Deployment, share: float) -> float:
    """Return the bytes of the sectors with changed elements, if these lie anywhere."""
    in_sector = SECTOR_BYTES // deployment.precision.element_bytes
    return deployment.card_bytes * (1 - (1 - share) ** in_sector)


def commit_s(deployment: Deployment, form: Form, share: float, machine: Machine = H100) -> float:
    """Return the seconds for which a commit delays steps, at ``share`` of changed elements.

    Not for ``OFF``, which has no commit of its own: see ``stall_s``.
    """
    of = moved(deployment, form, share)
    package = PACKAGE
    if form is Form.DEVICE:
        model = deployment.model
        pieces = (
            deployment.card_bytes / package.spare.value + model.layers * model.tensors_per_layer
        )
        copies = 3 * pieces
        return package.commit.value + max(of.memory / machine.copies, copies * package.launch.value)
    if form is Form.HOST:
        # one stream makes all copies one after the other
        link = of.to_card / machine.to_card.value + of.from_card / machine.from_card.value
        return package.commit.value + link + of.memory / machine.copies
    if form is Form.CHANGES:
        # one kernel does both directions of the link at once
        return package.commit.value + max(
            of.memory / machine.scattered,
            of.to_card / machine.kernel_to_card.value,
            of.from_card / machine.kernel_from_card.value,
        )
    if form is Form.REMAP:
        pages = package.remap_byte.value * deployment.card_bytes
        handles = package.remap_handles.value * package.remap_handle.value
        return package.commit.value + package.remap_drain.value + handles + pages
    return package.commit.value


@dataclass(frozen=True)
class Staging:
    """The parts of staging. All overlap but finishing, which comes at the end.

    One thread stages, and reads whole weights for the digest: ``python_s`` and ``digest_s`` add up.
    It sleeps for ``bytes_s`` and ``interpreter_s`` at least, and these have its work in them.
    ``reads_early`` is false if the digest comes at the end.
    """

    transport_s: float
    bytes_s: float
    interpreter_s: float
    finishing_s: float
    digest_s: float
    python_s: float = 0.0
    reads_early: bool = True

    @property
    def total_s(self) -> float:
        after = self.finishing_s + (0.0 if self.reads_early else self.digest_s)
        return max(self._overlapping.values()) + after

    @property
    def bound(self) -> str:
        """Return the overlapping part that the others wait for."""
        parts = self._overlapping
        return max(parts, key=lambda name: parts[name])

    @property
    def _overlapping(self) -> dict[str, float]:
        parts = {
            TRANSPORT: self.transport_s,
            "pace of bytes": self.bytes_s,
            "interpreter": self.interpreter_s,
        }
        return parts | ({"digest": self.python_s + self.digest_s} if self.reads_early else {})


def staging(
    deployment: Deployment,
    machine: Machine = H100,
    *,
    form: Form = Form.CHANGES,
    sent: float | None = None,
) -> Staging:
    """Return how long a broadcast update is staged by its plan, while requests run.

    The layout was seen before: ``first_s`` is what the first update takes beside this. Every card
    receives all tensors and takes its part. ``sent``: bytes broadcast, if not all.
    """
    total, share = deployment.total_bytes, PACKAGE.interpreter_share.value
    finished = deployment.finished_tensors
    interpreter_s = (deployment.tensors - finished) * PACKAGE.tensor_planned.value
    interpreter_s += finished * PACKAGE.tensor_loaded.value
    # a part goes into a raw module in the host's memory, and back to the card to be finished
    over_link = 1 / machine.from_card.value + 1 / machine.to_card.value
    return Staging(
        transport_s=(total if sent is None else sent) / PACKAGE.broadcast.value,
        bytes_s=touched_bytes(deployment, form) / PACKAGE.pace.value,
        interpreter_s=interpreter_s / share,
        python_s=interpreter_s,
        finishing_s=deployment.finished_bytes * over_link,
        digest_s=_digest_s(deployment, machine),
    )


@dataclass(frozen=True)
class Parts:
    """How parts are sent and staged. The defaults are those of the package, for one server.

    ``servers``: of one layout. ``relays``: whether they hand parts on to each other.
    ``cuts_rows``: whether the trainer cuts the rows of each tensor over all its cards, as FSDP2
    does. ``readers``: threads that read for the digest; more than one are not built. ``pace``:
    bytes per second.
    """

    servers: int = 1
    relays: bool = True
    cuts_rows: bool = False
    readers: float = 1
    pace: float = PACKAGE.pace.value


# seven times a network card's rate: a part is touched six times
_WIDE_PACE = Parts(pace=7 * H100.nic.value)
VARIANTS = {
    "as built": Parts(),
    "4 servers": Parts(servers=4),
    "4 servers, no relays": Parts(servers=4, relays=False),
    "a trainer by FSDP2": Parts(cuts_rows=True),
    "at a pace of 350 GB/s": _WIDE_PACE,
    "and with 4 readers": replace(_WIDE_PACE, readers=PACKAGE.readers_at_rest.value),
}


def sharded(
    deployment: Deployment,
    machine: Machine = H100,
    *,
    parts: Parts = VARIANTS["as built"],
    form: Form = Form.CHANGES,
) -> Staging:
    """Return how long an update by parts is staged, from a sharded trainer.

    Every card receives what it keeps, over its own network card. Of several servers of one layout
    the first receives it from the trainer, and each hands buckets on to the next.
    """
    per_card = RUN.trainer_cards.value
    weights, hops, copies = deployment.card_bytes, 0.0, parts.servers
    if parts.relays:
        hops, copies = (parts.servers - 1) * PACKAGE.bucket.value, 1
    finished = deployment.finished_tensors
    interpreter_s = (deployment.own_tensors - finished) * PACKAGE.tensor_planned.value
    interpreter_s += finished * PACKAGE.tensor_loaded.value
    if parts.cuts_rows and (pieces := deployment.cards * per_card) > 1:
        interpreter_s += deployment.own_tensors * pieces * PACKAGE.piece.value
    return replace(
        staging(deployment, machine, form=form),
        transport_s=(max(weights, weights * copies / per_card) + hops) / machine.nic.value,
        bytes_s=touched_by_parts(deployment, form) / parts.pace,
        interpreter_s=interpreter_s / PACKAGE.interpreter_share.value,
        python_s=interpreter_s,
        digest_s=_digest_s(deployment, machine, parts.readers),
    )


def touched_by_parts(deployment: Deployment, form: Form) -> float:
    """Return the bytes that count for the pace where parts come: nothing but the card's own."""
    # a check reads a part, a batch holds it, and then it is written or compared, and hashed
    return (2 + _passes(form)) * deployment.card_bytes


def touched_bytes(deployment: Deployment, form: Form) -> float:
    """Return the bytes that count for the pace, without those of finishing.

    Every tensor that comes is read by a check. One of which the card takes a part waits in a
    batch. Then a weight is written (whole copies), or read, compared, and its bits are kept. In the
    end it is read for the digest.
    """
    taken = deployment.taken_bytes + _passes(form) * deployment.card_bytes
    return deployment.total_bytes + taken


def _passes(form: Form) -> int:
    return 4 if form is Form.CHANGES else 2


def first_s(deployment: Deployment, *, tensor_s: float = PACKAGE.tensor_loaded.value) -> float:
    """Return the seconds that the first update of a layout takes beside ``staging``.

    The plan is searched by a run of the loader, and the served checkpoint proves it. Of a model
    that SGLang finishes the checkpoint is also loaded and finished, at ``tensor_s`` a tensor. With
    ``SGLANG_INFLIGHT_PROOF=start`` a server does all of this when it starts.
    """
    share = PACKAGE.interpreter_share.value
    proof_s = deployment.taken_bytes / PACKAGE.reading.value
    found_s = deployment.tensors * PACKAGE.tensor_recorded.value / share + proof_s
    if not deployment.is_finished:
        return found_s
    return found_s + deployment.tensors * tensor_s / share + proof_s


def _digest_s(deployment: Deployment, machine: Machine, readers: float = 1) -> float:
    """Return the seconds of a digest: pieces go to the host and are hashed there, in turn.

    ``readers`` threads do so, and share the link.
    """
    copied_s = 1 / machine.from_card.value
    in_turn_s = copied_s + 1 / PACKAGE.hashing.value
    return deployment.card_bytes * max(copied_s, in_turn_s / readers)


def held_s(
    deployment: Deployment,
    machine: Machine = H100,
    *,
    tensor_s: float = PACKAGE.tensor_loaded.value,
) -> float:
    """Return the seconds for which requests wait in the form ``off``, where nothing is paced.

    Such an update has no plan: each tensor takes ``tensor_s`` of the model's loader.
    """
    touched = deployment.total_bytes + deployment.card_bytes
    return Staging(
        transport_s=deployment.total_bytes / PACKAGE.broadcast.value,
        bytes_s=touched / machine.copies,
        interpreter_s=deployment.tensors * tensor_s,
        finishing_s=0.0,
        digest_s=_digest_s(deployment, machine, PACKAGE.readers_at_rest.value),
        reads_early=False,
    ).total_s


def stall_s(deployment: Deployment, form: Form, share: float, machine: Machine = H100) -> float:
    """Return the seconds in which no step runs: the commit, or all of an update in place."""
    if form is Form.OFF:
        return held_s(deployment, machine) + PACKAGE.commit.value
    return commit_s(deployment, form, share, machine)


def changes_sent_bytes(deployment: Deployment, share: float) -> float:
    """Return the bytes of the sparse tensors that carry ``share`` of the whole model's elements.

    Tensors that SGLang finishes come whole.
    """
    width = deployment.precision.element_bytes
    whole = deployment.finished_bytes * deployment.attention_cards
    # positions are int32
    return whole + (deployment.total_bytes - whole) / width * share * (width + 4)


@dataclass(frozen=True)
class Staleness:
    """The age of tokens and of the trainer at the first token of a new version.

    ``age_s``: seconds since the trainer had the version. ``tokens``: decoded meanwhile by a stream,
    with the version before. ``train_steps``: steps of the trainer meanwhile.
    """

    age_s: float
    tokens: float
    train_steps: float


def staleness(staged_s: float, stalled_s: float) -> Staleness:
    """Return the staleness of an update that was staged for ``staged_s`` beside decoding."""
    age = staged_s + stalled_s
    return Staleness(age, staged_s * RUN.stream.value, age / RUN.train_step.value)


@dataclass(frozen=True)
class Memory:
    """Bytes on a card, and those of the host for a card.

    ``weights``: served. ``copy``: kept from the start. ``open``: while an update is open, beside
    the activations. ``kv``: left for the KV cache, negative if the card is too small. ``host``: at
    most, pinned. ``static``, ``headroom``: the two parts of the card.
    """

    weights: float
    copy: float
    open: float
    kv: float
    host: float
    static: float
    headroom: float

    @property
    def fits(self) -> bool:
        return self.kv > 0 and self.open < self.headroom


def memory(deployment: Deployment, form: Form, share: float, machine: Machine = H100) -> Memory:
    """Return the memory of ``form``, at ``share`` of changed elements."""
    weights = deployment.card_bytes
    static = machine.card.value * machine.static_share.value
    copy = weights if form in (Form.DEVICE, Form.REMAP, Form.POINTERS) else 0.0
    host = weights * PACKAGE.rounding.value if form is Form.HOST else 0.0
    opened = PACKAGE.buffers.value
    if form in (Form.DEVICE, Form.HOST):
        opened += PACKAGE.spare.value
    if form is Form.CHANGES:
        kept = changes_bytes(deployment, share)
        if are_on_host(deployment, share):
            host = kept * PACKAGE.rounding.value
        else:
            opened += kept
    return Memory(
        weights, copy, opened, static - weights - copy, host, static, machine.card.value - static
    )


def one_way_s(nbytes: float, machine: Machine = H100) -> float:
    """Return the seconds of a copy of ``nbytes`` from pinned memory of the host to a card."""
    return nbytes / machine.to_card.value


def received_s(nbytes: float, machine: Machine = H100) -> float:
    """Return the least seconds in which a card receives ``nbytes`` over its own network card."""
    return nbytes / machine.nic.value


def broadcast_least_s(total: float, cards: int, machine: Machine = H100) -> float:
    """Return the least seconds in which all of ``cards`` receive ``total`` bytes.

    Each card brings its part from the host. All network cards of a node share the rest.
    """
    slowest = [total / cards / machine.to_card.value, total / machine.nvlink.value]
    if cards > machine.cards_per_node.value:
        slowest.append(total / (machine.cards_per_node.value * machine.nic.value))
    return max(slowest)


@dataclass(frozen=True)
class Published:
    """A published figure, and what the model gives for its setting.

    ``seconds``: as published; the first one is compared. ``limit_s``: the model's. ``counts``: the
    bytes that move in it, and over which link. ``why``: why the two differ; what the source does
    not say is supposed.
    """

    system: str
    setting: str
    seconds: tuple[float, ...]
    limit_s: float
    counts: str
    why: str
    source: str


_STITCH = "https://github.com/modal-projects/stitch, README at a250dc3 (2026-08-17)"
_RDT = "https://vllm.ai/blog/2026-08-22-rdt-weight-transfer"
_PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/pull/3341 (2026-08)"
_M2N = "https://github.com/NVIDIA-NeMo/RL/pull/2413 (2026-05-05)"
_FROM_HOST = "a card's weights once from pinned memory"
_PER_NIC = "a card's weights by its network card"
_PER_NODE = "the model by NVLink, and by 8 network cards a node"


def _received_by(model: Model, precision: Precision, cards: int, attention: int) -> float:
    return received_s(Deployment(model, precision, cards, attention).card_bytes)


def _broadcast_of(model: Model, precision: Precision, cards: int, machine: Machine) -> float:
    whole = Deployment(model, precision, cards, cards).total_bytes
    return broadcast_least_s(whole, cards, machine)


def published() -> tuple[Published, ...]:
    """Return the figures of peers, each beside the model's limit for its setting."""
    bf16, fp8 = Precision.BF16, Precision.FP8
    # four bits and a scale of 8 bits for each 16, and the rest in bfloat16
    kimi_fp4 = KIMI.expert_parameters * (0.5 + 1 / 16) + KIMI.other_bytes(bf16)
    h20 = replace(H100, name="8x H20")
    return (
        Published(
            "stitch",
            "GLM-4.5-Air FP8, TP 4: pause",
            (0.99,),
            one_way_s(106 * GB / 4),
            _FROM_HOST,
            "We suppose that a fixed half second is left for the grant of the pause and for copies "
            "of small tensors; larger models show less of it.",
            _STITCH,
        ),
        Published(
            "stitch",
            "GLM-5.2 FP8, TP 4: pause",
            (3.44,),
            one_way_s(744 * GB / 4),
            _FROM_HOST,
            "A PCIe 5 link explains the pause. The source does not name the cards.",
            _STITCH,
        ),
        Published(
            "stitch",
            "Kimi K2.6 NVFP4, TP 4: pause",
            (2.82,),
            one_way_s(kimi_fp4 / 4),
            _FROM_HOST,
            "See above. The checkpoint's size is computed here.",
            _STITCH,
        ),
        Published(
            "stitch",
            "Kimi K3 MXFP4, TP 8: pause",
            (3.84,),
            one_way_s(3.22 * TB / 2 / 8),
            _FROM_HOST,
            "See above. The checkpoint and all images have twice the bytes, says the source.",
            _STITCH,
        ),
        Published(
            "stitch",
            "GLM-4.7-Flash bf16, 1x H200: pause, p50 and p95",
            (0.58, 1.13),
            one_way_s(60 * GB),
            _FROM_HOST,
            "The median is below a copy of all weights over one link. We suppose that only "
            "tensors with changes are copied.",
            "https://github.com/modal-projects/stitch, cookbook/README.md at a250dc3 (2026-08-17)",
        ),
        Published(
            "checkpoint-engine",
            "Qwen3-235B bf16, 8x H800, broadcast",
            (6.22,),
            _broadcast_of(QWEN_235B, bf16, 8, H800),
            _PER_NODE,
            "The engine's loader gets 36,945 tensors: 0.17 ms each. We suppose that it decides.",
            _CHECKPOINT_ENGINE,
        ),
        Published(
            "checkpoint-engine",
            "DeepSeek-V3.1 FP8, 16 and 256x H20, broadcast",
            (10.19, 11.33),
            _broadcast_of(DEEPSEEK, fp8, 16, h20),
            _PER_NODE,
            "90,000 tensors go through the loader. We suppose that it decides: 16 times the cards "
            "cost a tenth more.",
            _CHECKPOINT_ENGINE,
        ),
        Published(
            "checkpoint-engine",
            "Kimi K2 FP8, 16 and 256x H20, broadcast",
            (14.36, 16.04),
            _broadcast_of(KIMI, fp8, 16, h20),
            _PER_NODE,
            "139,500 tensors go through the loader, see above.",
            _CHECKPOINT_ENGINE,
        ),
        Published(
            "vLLM, NCCL broadcast",
            "Qwen3-235B bf16, DP 16 EP 16",
            (64.72,),
            _broadcast_of(QWEN_235B, bf16, 16, H100),
            _PER_NODE,
            "We suppose that the trainer gathers and broadcasts 37,000 tensors one by one.",
            _RDT,
        ),
        Published(
            "vLLM, RDT",
            "Qwen3-235B bf16, DP 16 EP 16; its versions V3, V2, V1",
            (3.49, 5.61, 25.02),
            _received_by(QWEN_235B, bf16, 16, 1),
            _PER_NIC,
            "The figure includes the trainer's gathering, and the engine's processing of each "
            "layer. From V1 to V3 these were made fewer and overlapped.",
            _RDT,
        ),
        Published(
            "vLLM, RDT",
            "Kimi K2 bf16, 16 nodes, 7.9 TB",
            (7.53,),
            received_s(7.9 * TB / 128),
            _PER_NIC,
            "The trainer's 8 pipeline stages send one after the other, for want of memory. The "
            "source counts 5 s for that.",
            _RDT,
        ),
        Published(
            "prime-rl, NIXL",
            "GLM-5.2, 82.5 GB a card: RDMA, update, whole call",
            (1.86, 2.84, 7.90),
            received_s(82.5 * GB),
            _PER_NIC,
            "RDMA reaches 44 of 50 GB/s. Writing into the model makes it 2.84 s, and the pause "
            "alone takes 5.2 s.",
            _PRIME,
        ),
        Published(
            "miles, NCCL",
            "Qwen3-30B-A3B bf16, TP 8 EP 8",
            (2.67,),
            _broadcast_of(QWEN_30B, bf16, 16, H100),
            _PER_NODE,
            "The trainer gathers and converts tensors first. We suppose that this and the "
            "broadcasts take turns.",
            _MILES,
        ),
        Published(
            "miles, NCCL",
            "Qwen3-235B bf16, TP 32 EP 32",
            (10.75,),
            _broadcast_of(QWEN_235B, bf16, 64, H100),
            _PER_NODE,
            "See above. This row's rate stands for our own broadcasts in the other tables.",
            _MILES,
        ),
        Published(
            "miles, NCCL",
            "Kimi K2 FP8, TP 32 EP 32",
            (53.28,),
            _broadcast_of(KIMI, fp8, 256, H100),
            _PER_NODE,
            "See above. We suppose that quantizing adds to it.",
            _MILES,
        ),
        Published(
            "miles, RDMA",
            "Qwen3-235B bf16, TP 32 EP 32",
            (3.16,),
            _received_by(QWEN_235B, bf16, 32, 32),
            _PER_NIC,
            "The trainer gathers, and loads a copy of a rank's engine in its host's memory, before "
            "it writes.",
            _MILES,
        ),
        Published(
            "miles, RDMA",
            "Kimi K2 FP8, TP 32 EP 32",
            (7.23,),
            _received_by(KIMI, fp8, 32, 32),
            _PER_NIC,
            "See above, and 0.88 s of finishing after the transfer.",
            _MILES,
        ),
        Published(
            "NeMo-RL, NCCL m2n",
            "Qwen3-30B-A3B bf16, TP 4 DP 4",
            (0.48, 0.67),
            _received_by(QWEN_30B, bf16, 4, 4),
            _PER_NIC,
            "Shards go straight to shards, for 95 % of the bytes.",
            _M2N,
        ),
        Published(
            "NeMo-RL, NCCL m2n",
            "Qwen3-235B bf16, TP 8 DP 16",
            (4.56, 4.85),
            _received_by(QWEN_235B, bf16, 8, 8),
            _PER_NIC,
            "16 replicas receive from one trainer. We suppose that its pipeline stages send in "
            "turn.",
            _M2N,
        ),
        Published(
            "NeMo-RL, NCCL m2n",
            "DeepSeek-V3 bf16, TP 32 DP 8",
            (7.65, 9.94),
            _received_by(DEEPSEEK, bf16, 32, 32),
            _PER_NIC,
            "See above; here the trainer has 16 stages.",
            _M2N,
        ),
    )


# bytes of touched memory per second, while requests run
CPU_PACE = 640 * MIB


@dataclass(frozen=True)
class OnACPU:
    """An update that we measured on two cores, at ``CPU_PACE``, with ``touches`` a byte."""

    name: str
    nbytes: float
    touches: int
    measured_s: float

    @property
    def model_s(self) -> float:
        return self.touches * self.nbytes / CPU_PACE


ON_A_CPU = (
    OnACPU("135M from tensors", 269e6, 5, 3.11),
    OnACPU("500M from tensors", 994e6, 5, 9.82),
    OnACPU("1.5B from tensors", 3020e6, 5, 28.8),
    OnACPU("135M from disk", 269e6, 6, 2.80),
    OnACPU("500M from disk", 994e6, 6, 8.46),
    OnACPU("1.5B from disk", 3020e6, 6, 23.8),
)


# ---- tables -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of the page, between the markers with its ``name``."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def begin(self) -> str:
        return f"<!-- scale: {self.name} -->"

    @property
    def end(self) -> str:
        return f"<!-- end of scale: {self.name} -->"

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def rich(self) -> RichTable:
        table = RichTable(title=self.title)
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*row)
        return table


def tables() -> tuple[Table, ...]:
    """Return all tables, in the order of the page."""
    return (
        _summary(),
        _deployed(),
        _stalls(),
        _memories(),
        _stagings(),
        _sharded(),
        _variants(),
        _comparison(),
        _calibration(),
        _open_constants(),
        _constants(),
    )


def constants() -> dict[str, Constant]:
    """Return every constant by the name of its field."""
    return {
        field.name: value
        for group in (H100, PACKAGE, RUN)
        for field in fields(group)
        if isinstance(value := getattr(group, field.name), Constant)
    }


def _summary() -> Table:
    rows: list[list[str]] = []
    for form in (Form.CHANGES, Form.HOST, Form.DEVICE, Form.REMAP):
        fitting = [each for each in DEPLOYMENTS if memory(each, form, ONE_STEP).fits]
        stalls = [stall_s(each, form, ONE_STEP) for each in fitting]
        note = f"{len(fitting)} of {len(DEPLOYMENTS)} deployments fit"
        if form is Form.REMAP:
            note += "; not built"
        rows.append(
            [f"stall, `{form.value}`", f"{_ms(min(stalls))} to {_ms(max(stalls))} ms", note]
        )
    held = [held for each in DEPLOYMENTS for held in _by_loader(each)]
    rows.append(["stall, `off`", f"{_range(min(held), max(held))} s", "the whole update"])
    staged = [staging(each) for each in DEPLOYMENTS]
    totals = [each.total_s for each in staged]
    wire = sum(each.bound == TRANSPORT for each in staged)
    rows.append(
        [
            "staged beside decoding, by broadcasts",
            f"{_range(min(totals), max(totals))} s",
            f"bound by the transport in {wire} of {len(DEPLOYMENTS)}",
        ]
    )
    by_parts = [sharded(each) for each in DEPLOYMENTS]
    totals = [each.total_s for each in by_parts]
    wire = sum(each.bound == TRANSPORT for each in by_parts)
    rows.append(
        [
            "staged beside decoding, by parts",
            f"{_range(min(totals), max(totals))} s",
            f"bound by the transport in {wire} of {len(DEPLOYMENTS)}",
        ]
    )
    return Table("summary", f"All deployments, {ONE_STEP:.0%} changed", ("", "", ""), rows)


def _by_loader(deployment: Deployment) -> tuple[float, float]:
    """Return the seconds of an update in place: with a fast host's loader, and with ours."""
    return held_s(deployment, tensor_s=PACKAGE.tensor_at_best.value), held_s(deployment)


def _deployed() -> Table:
    columns = ("deployment", "layout", "cards", "whole, GB", "a card, GB", "tensors", "staged")
    rows = [
        [
            each.name,
            each.layout,
            str(each.cards),
            _gb(each.total_bytes),
            _gb(each.card_bytes),
            f"{each.tensors:,}",
            "after a proof" if each.is_finished else "yes",
        ]
        for each in DEPLOYMENTS
    ]
    return Table("deployments", "Models and layouts", columns, rows)


def _stalls() -> Table:
    columns = (
        "deployment",
        *(f"`changes`, {share:.1%}" for share in SHARES),
        "`device`",
        "`host`",
        "remap, not built",
        "`off`, s",
    )
    rows = []
    for each in DEPLOYMENTS:
        cells = [each.name]
        for share in SHARES:
            mark = " (h)" if are_on_host(each, share) else ""
            cells.append(_ms(stall_s(each, Form.CHANGES, share)) + mark)
        for form in (Form.DEVICE, Form.HOST, Form.REMAP):
            fits = memory(each, form, ONE_STEP).fits
            cells.append(_ms(stall_s(each, form, ONE_STEP)) if fits else NO_ROOM)
        cells.append(_range(*_by_loader(each)))
        rows.append(cells)
    return Table("stall", "Stall of an update, ms", columns, rows)


def _memories() -> Table:
    columns = (
        "deployment",
        "weights, GB",
        "KV, GB: `changes`, `host`, `off`",
        "KV, GB: `device`",
        *(f"changes, {share:.1%}, GB" for share in SHARES),
        "`host`, GB a node",
    )
    rows = []
    for each in DEPLOYMENTS:
        changed = [memory(each, Form.CHANGES, share) for share in SHARES]
        whole = memory(each, Form.DEVICE, ONE_STEP)
        host = memory(each, Form.HOST, ONE_STEP).host
        used = min(each.cards, int(H100.cards_per_node.value))
        rows.append(
            [
                each.name,
                _gb(each.card_bytes),
                _gb(changed[0].kv) if changed[0].fits else NO_ROOM,
                _gb(whole.kv) if whole.fits else NO_ROOM,
                *(
                    f"{_gb(changes_bytes(each, share))}{' (h)' if are_on_host(each, share) else ''}"
                    for share in SHARES
                ),
                f"{_gb(host * used / PACKAGE.rounding.value)} to {_gb(host * used)}",
            ]
        )
    return Table("memory", "Memory of a card and of a node", columns, rows)


def _stagings() -> Table:
    columns = (
        "deployment",
        "transport, s",
        f"transport of {ONE_STEP:.0%}, s",
        "bytes, s",
        "interpreter, s",
        "finishing, s",
        "digest, s",
        "staged, s",
        "bound by",
        "tokens of a stream meanwhile",
        "trainer's steps",
        "the first update takes longer by, s",
    )
    rows = []
    for each in DEPLOYMENTS:
        staged = staging(each)
        stale = staleness(staged.total_s, stall_s(each, Form.CHANGES, ONE_STEP))
        sparse = staging(each, sent=changes_sent_bytes(each, ONE_STEP)).transport_s
        first = (first_s(each, tensor_s=PACKAGE.tensor_at_best.value), first_s(each))
        rows.append(
            [
                each.name,
                _round(staged.transport_s),
                _round(sparse),
                _round(staged.bytes_s),
                _round(staged.interpreter_s),
                _round(staged.finishing_s),
                _round(staged.digest_s),
                _round(staged.total_s),
                staged.bound,
                _round(stale.tokens),
                _round(stale.train_steps),
                _range(*first),
            ]
        )
    return Table("staging", "Staging by broadcasts beside decoding, and staleness", columns, rows)


def _sharded() -> Table:
    columns = (
        "deployment",
        "transport, s",
        "bytes, s",
        "interpreter, s",
        "finishing, s",
        "digest, s",
        "staged, s",
        "bound by",
        "by broadcasts, s",
        "tokens of a stream meanwhile",
        "trainer's steps",
    )
    rows = []
    for each in DEPLOYMENTS:
        staged = sharded(each)
        stale = staleness(staged.total_s, stall_s(each, Form.CHANGES, ONE_STEP))
        rows.append(
            [
                each.name,
                _round(staged.transport_s),
                _round(staged.bytes_s),
                _round(staged.interpreter_s),
                _round(staged.finishing_s),
                _round(staged.digest_s),
                _round(staged.total_s),
                staged.bound,
                _round(staging(each).total_s),
                _round(stale.tokens),
                _round(stale.train_steps),
            ]
        )
    return Table("sharded", "Staging by parts beside decoding", columns, rows)


def _variants() -> Table:
    found = [[sharded(each, parts=parts) for parts in VARIANTS.values()] for each in DEPLOYMENTS]
    rows = [
        [each.name, *(f"{_round(staged.total_s)} ({staged.bound})" for staged in row)]
        for each, row in zip(DEPLOYMENTS, found, strict=True)
    ]
    of_variants = list(zip(*found, strict=True))
    fast = [sum(staged.total_s <= GOAL_S for staged in column) for column in of_variants]
    wire = [sum(staged.bound == TRANSPORT for staged in column) for column in of_variants]
    rows.append([f"at most {GOAL_S:.0f} s", *(f"{n} of {len(DEPLOYMENTS)}" for n in fast)])
    rows.append(["bound by the transport", *(f"{n} of {len(DEPLOYMENTS)}" for n in wire)])
    columns = ("deployment", *VARIANTS)
    return Table("variants", "Staging by parts, other ways, s", columns, rows)


def _comparison() -> Table:
    columns = (
        "system",
        "setting",
        "published, s",
        "model, s",
        "ratio",
        "the model counts",
        "why they differ",
    )
    rows = [
        [
            f"[{each.system}]({_url(each.source)})",
            each.setting,
            ", ".join(f"{seconds:.2f}" for seconds in each.seconds),
            _round(each.limit_s),
            _round(each.seconds[0] / each.limit_s),
            each.counts,
            each.why,
        ]
        for each in published()
    ]
    return Table("published", "Published figures beside the model's limits", columns, rows)


def _calibration() -> Table:
    columns = ("update", "measured, s", "model, s", "measured over model")
    rows = [
        [
            each.name,
            _round(each.measured_s),
            _round(each.model_s),
            _round(each.measured_s / each.model_s),
        ]
        for each in ON_A_CPU
    ]
    return Table("cpu", "Our own measurements on a CPU beside the model", columns, rows)


def _open_constants() -> Table:
    columns = ("constant", "value", "status", "the kit's step, and what it says there")
    rows = [
        [f"`{name}`", _value(constant), str(constant.status), _step(constant)]
        for name, constant in constants().items()
        if constant.settled_by or constant.status is Status.ASSUMED
    ]
    return Table("open", "Constants that are open", columns, rows)


def _step(constant: Constant) -> str:
    step, _, what = constant.settled_by.partition(": ")
    return f"`{step}`: {what}" if step else "none"


def _constants() -> Table:
    columns = ("constant", "value", "status", "source")
    rows = [
        [f"`{name}`", _value(constant), str(constant.status), constant.source]
        for name, constant in constants().items()
    ]
    rows += [
        [
            model.name,
            f"{_round(model.parameters / GB)} billion parameters",
            "published",
            model.source,
        ]
        for model in MODELS
    ]
    return Table("constants", "All constants", columns, rows)


def _value(constant: Constant) -> str:
    """Return the value with its unit, in units that people read."""
    value, unit = constant.value, constant.unit
    if unit.startswith("B") and value >= MIB:
        return f"{_round(value / GB)} G{unit}" if value >= GB else f"{_round(value / 1e6)} M{unit}"
    if unit == "s a byte":
        return f"{_round(value * GB * 1e3)} ms a GB"
    if unit.startswith("s") and value < 1:
        return (
            f"{_round(value * 1e3)} m{unit}" if value > 1e-4 else f"{_round(value * 1e6)} µ{unit}"
        )
    return f"{_round(value)} {unit}"


def _url(source: str) -> str:
    return next(word for word in source.split() if word.startswith("https://")).rstrip(",")


def _round(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    return _round(seconds * 1e3)


def _gb(nbytes: float) -> str:
    return _round(nbytes / GB)


def _range(least: float, most: float) -> str:
    low, high = _round(least), _round(most)
    return low if low == high else f"{low} to {high}"


def written(page: str) -> str:
    """Return ``page`` with each table between its markers.

    Raises ``ValueError`` that names the marker that ``page`` lacks.
    """
    for table in tables():
        before, begin, rest = page.partition(table.begin)
        _, end, after = rest.partition(table.end)
        if not (begin and end):
            raise ValueError(f"the page has no {table.begin} before a {table.end}")
        page = f"{before}{begin}\n{table.markdown()}{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.scale", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scale.md")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(written(PAGE.read_text()))
        return
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for table in tables():
        console.print(table.rich())


if __name__ == "__main__":
    main()
