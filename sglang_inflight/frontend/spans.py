"""Write version spans of output tokens into answers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec.structs

from sglang_inflight.hooking import AROUND, hook
from sglang_inflight.inactive import why_inactive
from sglang_inflight.messages import ADAPTER_VERSIONS
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.labels import AdapterLabel, VersionLabel, split_adapter

if TYPE_CHECKING:
    from sglang.srt.utils.weight_versions import WeightVersionSpan

Write = Callable[..., None]


# belongs to no manager: reads the process's ``why_inactive()``
@hook(
    "sglang.srt.managers.tokenizer_manager.add_weight_versions_to_meta_info",
    AROUND,
)
def write_spans(
    write: Write, meta_info: dict[str, Any], spans: list[WeightVersionSpan], num_output_tokens: int
) -> None:
    """Unpack version labels into ``meta_info``, around SGLang's ``write``, made for plain names."""
    if why_inactive() is not None:
        # without us the versions are plain names, not packed labels
        write(meta_info, spans, num_output_tokens)
        return
    labels = [_read(span.version) for span in spans]
    if as_sglang_writes_them():
        if meta_info["finish_reason"] is not None:
            named = [
                _changed(s, version=of.version) for s, (of, _) in zip(spans, labels, strict=True)
            ]
            write(meta_info, _merge(named), num_output_tokens)
        return
    if any(adapter is not None for _, adapter in labels):
        meta_info[ADAPTER_VERSIONS] = _of_adapters(spans, num_output_tokens)
        spans = _merge([_changed(span, version=split_adapter(span.version)[0]) for span in spans])
        labels = [_read(span.version) for span in spans]
    write(meta_info, spans, num_output_tokens)
    # SGLang leaves out spans behind the last token, and keeps the order
    for said, (label, _) in zip(meta_info["weight_versions"], labels, strict=False):
        said["version"] = label.version
        said |= label.beside_the_name()
    meta_info["weight_version"] = meta_info["weight_versions"][-1]["version"]


# a stream's chunks repeat the few versions in use
@functools.lru_cache(maxsize=1024)
def _read(text: str) -> tuple[VersionLabel, AdapterLabel | None]:
    packed, adapter = split_adapter(text)
    return VersionLabel.unpack(packed), adapter


def _of_adapters(
    spans: list[WeightVersionSpan], num_output_tokens: int
) -> list[dict[str, str | int]]:
    """Return spans of adapter versions; empty for a request without an adapter."""
    written: list[dict[str, str | int]] = []
    for label, run in itertools.groupby(spans, key=lambda span: _read(span.version)[1]):
        parts = list(run)
        start, end = parts[0].start, min(parts[-1].end, num_output_tokens)
        if label is not None and (start < num_output_tokens or start == 0):
            written.append(label.span(start, end))
    return written


@functools.cache
def as_sglang_writes_them() -> bool:
    """Whether spans come only in the last chunk, with adjacent spans of one name merged."""
    return Settings.from_environment().spans == "sglang"


def _merge(spans: list[WeightVersionSpan]) -> list[WeightVersionSpan]:
    runs = [list(run) for _, run in itertools.groupby(spans, key=lambda span: span.version)]
    return [_changed(run[0], end=run[-1].end) for run in runs]


def _changed(span: WeightVersionSpan, **fields: Any) -> WeightVersionSpan:
    struct: Any = span
    changed: WeightVersionSpan = msgspec.structs.replace(struct, **fields)
    return changed
