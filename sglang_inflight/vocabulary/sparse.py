"""Sparse tensors, and folders of them: the names that a trainer writes and a server reads.

``NAME.indices`` has flat positions in the tensor NAME, and ``NAME.values`` the elements there. A
folder has safetensors files of such pairs, and a manifest:

    sparse.json  {"format": "sglang-inflight-sparse", "format_version": 1,
                  "base_version": "<version>", "base_digests": ["<hex>", ...],
                  "files": {"<name>.safetensors": {"sha256": "<hex>", "bytes": N}, ...}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from sglang_inflight.vocabulary.bodies import DigestText, Version, check_version

if TYPE_CHECKING:
    import torch

INDICES = ".indices"
VALUES = ".values"
MANIFEST = "sparse.json"


def tensor_of(half: str) -> str:
    """Return the name of the tensor that a ``half`` is of."""
    return half.removesuffix(INDICES) if half.endswith(INDICES) else half.removesuffix(VALUES)


def index_dtype(elements: int) -> torch.dtype:
    """Return the dtype of positions in a tensor of so many elements."""
    import torch

    return torch.int32 if elements - 1 <= torch.iinfo(torch.int32).max else torch.int64


class ManifestFile(msgspec.Struct):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, omit_defaults=True):
    """``base_version`` is the label of the version that the folder changes.

    A label may be on other weights, too. ``base_digests`` has the digest of the first rank that
    serves the version, as in its receipt, for each layout of servers; empty: the label is enough.
    """

    format: Literal["sglang-inflight-sparse"]
    format_version: Literal[1]
    base_version: Version
    files: dict[str, ManifestFile]
    base_digests: tuple[DigestText, ...] = ()

    def __post_init__(self) -> None:
        check_version(self.base_version)
