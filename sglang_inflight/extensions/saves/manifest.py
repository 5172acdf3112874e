"""Served weights in a folder: the names that a server writes and another server reads.

Each rank of one replica writes the tensors that it serves, as they are: sharded, fused, finished.

    rank-pp0-tp0.safetensors  the tensors, by the role of their model and their own names
    rank-pp0-tp0.json         ``RankPart``: how they lie, and each one's digest
    served.json               ``Manifest``: written last, so a folder without it is not whole

The first two exist once for each rank of a replica. Each file begins with the format's name, the
tensors' file in its metadata.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sglang_inflight.vocabulary.bodies import DigestText, Name, Version, check_version

MANIFEST = "served.json"
Format = Literal["sglang-inflight-served"]
FORMAT: Format = "sglang-inflight-served"


class SavedRank(msgspec.Struct, frozen=True):
    """One rank's files. ``digest`` is the rank's, as in a receipt."""

    digest: DigestText
    # size of the safetensors file
    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True):
    """``save_id`` is in every file of one save. ``ranks`` is by ``name_of_rank``."""

    format: Format
    format_version: Literal[1]
    save_id: Name
    weight_version: Version
    ranks: dict[str, SavedRank]

    def __post_init__(self) -> None:
        check_version(self.weight_version)


class RankPart(msgspec.Struct, frozen=True):
    """``layout``: the facts by which servers with different tensor layouts differ.

    ``tensors``: each tensor's digest (``tensor_digest.py``). ``numbers``: numbers that SGLang's
    finishing makes, written as Python writes them.
    """

    format: Format
    save_id: Name
    layout: dict[str, str]
    tensors: dict[str, DigestText]
    numbers: dict[str, str]


def name_of_rank(pp: int, tp: int) -> str:
    return f"pp{pp}-tp{tp}"


def tensors_file(rank: str) -> str:
    return f"rank-{rank}.safetensors"


def part_file(rank: str) -> str:
    return f"rank-{rank}.json"
