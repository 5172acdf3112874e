"""Read records of an answer's tokens from ``meta_info``, and write them for vLLM's clients.

SGLang records the experts of each token but the last, and the tokens that truncated sampling left.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pybase64

from sglang_inflight.extensions.records.checks import why_no_rows
from sglang_inflight.extensions.trails import REPLAY
from sglang_inflight.messages import ADAPTER_VERSIONS, KV_VERSIONS, RECORDS
from sglang_inflight.sglang_types import get_exec
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_inflight.sglang_types import TokenizerManager

WEIGHT_VERSIONS = "weight_versions"

# names of the number of experts in models' configurations
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# pads a row of a rectangle of token ids, for SkyRL
_NO_TOKEN = -1


def wants_experts(said: bool | None) -> bool:
    """Whether an answer has its tokens' experts: as the request says, else as the server records.

    Without a word from the request, a server that mixes up what it records returns none. Raises
    ``Refused`` for a request that needs experts from a server that records none.
    """
    records = get_exec().features.enable_return_routed_experts
    if said and not records:
        raise Refused(
            "return_routed_experts: this server records no experts. Start it with "
            "--enable-return-routed-experts"
        )
    return records and why_no_rows() is None if said is None else said


def spans_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Return what ``meta`` says of its tokens' versions and records, under the names there.

    A whole answer may have what a repetition needs, too.
    """
    spans = {WEIGHT_VERSIONS: meta.get(WEIGHT_VERSIONS)}
    others = (KV_VERSIONS, ADAPTER_VERSIONS, RECORDS, REPLAY)
    return spans | {name: meta[name] for name in others if name in meta}


class Experts:
    """Write the experts of one model's tokens, from token ``start`` on to the last but one.

    SGLang has them as base64 of int32, of shape (tokens, layers, experts per token). The last
    token has none: no forward follows it.
    """

    def __init__(self, config: ModelConfig) -> None:
        text = config.hf_text_config
        self._shape = (-1, text.num_hidden_layers, text.num_experts_per_tok)
        count = next((getattr(text, name) for name in _EXPERTS if hasattr(text, name)), None)
        # vLLM's type; if the configuration has another name, any id fits
        self._dtype: np.dtype[Any] = np.dtype(np.int32)
        if isinstance(count, int):
            self._dtype = np.dtype(np.uint8 if count <= 1 << 8 else np.uint16)

    def as_npy(self, meta: dict[str, Any]) -> str | None:
        """Return vLLM's form: base64 of a file of ``numpy.save``, of the model's narrowest type.

        None if nothing was recorded, as for a request aborted before its first token.
        """
        ids = self._read(meta)
        if ids is None:
            return None
        with io.BytesIO() as file:
            np.save(file, ids.astype(_first_that_holds(ids, self._dtype)), allow_pickle=False)
            return pybase64.b64encode(file.getbuffer()).decode()

    def as_array(self, meta: dict[str, Any], start: int) -> dict[str, Any] | None:
        """Return the form of prime-rl's server: an array of the model's narrowest type."""
        ids = self._read(meta)
        if ids is None:
            return None
        return {**pack(ids.astype(_first_that_holds(ids, self._dtype))), "start": start}

    def as_narrow_array(self, meta: dict[str, Any]) -> dict[str, Any] | None:
        """Return SkyRL's form: an array of the narrowest type for these very ids."""
        ids = self._read(meta)
        if ids is None:
            return None
        narrow = (np.dtype(np.uint8), np.dtype(np.uint16))
        return pack(ids.astype(_first_that_holds(ids, *narrow)))

    def _read(self, meta: dict[str, Any]) -> NDArray[np.int32] | None:
        encoded = meta.get("routed_experts")
        if encoded is None:
            return None
        return np.frombuffer(pybase64.b64decode(encoded), dtype=np.int32).reshape(self._shape)


def _first_that_holds(ids: NDArray[np.int32], *types: np.dtype[Any]) -> np.dtype[Any]:
    """Return the first of ``types`` that holds all ids, else int32."""
    least, largest = ids.min(initial=0), ids.max(initial=0)
    for dtype in types:
        limits = np.iinfo(dtype)
        if limits.min <= least and largest <= limits.max:
            return dtype
    return np.dtype(np.int32)


def masks_of(meta: dict[str, Any], since: int, until: int) -> list[list[int]]:
    """Return, of each token from ``since`` to ``until``, the ids that sampling could choose from.

    ``meta`` has none of a request aborted before its first token.
    """
    return list(meta.get("output_token_sampling_mask", ())[since:until])


def pack_masks(masks: Sequence[Sequence[int]], width: int) -> dict[str, Any]:
    """Return SkyRL's form: int32 of shape (tokens, ``width``), each row padded with -1.

    Ties at the limit of ``top_k`` may make a row longer, and then all rows.
    """
    width = max([width, *map(len, masks)])
    rows = [[*mask, *[_NO_TOKEN] * (width - len(mask))] for mask in masks]
    return pack(np.array(rows, dtype=np.int32).reshape(len(rows), width))


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as JSON. ``data`` comes first: clients cut it out of the bytes, unparsed."""
    data = pybase64.b64encode(np.ascontiguousarray(array).data).decode()
    return {"data": data, "shape": list(array.shape), "dtype": array.dtype.name}


class NewTokens:
    """Tell a stream's new tokens from its old ones. Lives as long as the stream."""

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._adds = tokenizer_manager.incremental_streaming_output
        self._taken: dict[int, int] = {}

    def take(self, output: dict[str, Any]) -> tuple[list[int], int]:
        """Return the chunk's new tokens, and the position of the first in ``meta_info``'s lists."""
        index, meta = output.get("index", 0), output["meta_info"]
        tokens, since = output["output_ids"], 0
        before = self._taken.get(index, 0)
        if not self._adds:
            # the list may have grown since SGLang wrote this chunk's meta_info
            since = before
            tokens = tokens[since : meta["completion_tokens"]]
        elif meta["completion_tokens"] == before:
            # an abort repeats the last token
            tokens = []
        self._taken[index] = before + len(tokens)
        return tokens, since
