"""Compares the computation that a checkpoint's ``config.json`` asks for with the served one.

SGLang builds the model from the start's configuration, and an update brings weights alone. Weights
of the same shapes made for another RoPE or norm would be served by the wrong computation.

One configuration has many written forms: defaults are left out, and transformers 5 writes
``rope_parameters`` and ``dtype`` where transformers 4 wrote ``rope_theta``, ``rope_scaling`` and
``torch_dtype``. So both files are read by the served configuration's own class, and the results
are compared. The start's file is read again for that, because SGLang changes its own copy.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglang_inflight.scheduler.update.sources.checkpoint_files import (
    QUANTIZATION_CONFIGS,
    find_checkpoint,
)
from sglang_inflight.vocabulary.errors import Refused, describe, shorten

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# Names that tell who wrote a file, what a trainer does, or what a request may choose. SGLang
# computes in the dtype of its own start.
_WITHOUT_INFLUENCE = frozenset(GenerationConfig().to_dict()) | {
    "architectures",  # compared by the caller
    "auto_map",
    "aux_loss_alpha",
    "chunk_size_feed_forward",
    "cls_token_id",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "label2id",
    "mask_token_id",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "use_return_dict",
}
_OF_TRAINING = ("dropout", "_pdrop", "dropout_prob", "dropout_rate")
_OF_QUANTIZER = frozenset(
    {"global_compression_ratio", "producer", "quantization_status", "version"}
)
# names of one thing, in transformers 5 and 4
_ROPES = ("rope_parameters", "rope_scaling")
_MOST_NAMED = 3


class Difference(NamedTuple):
    key: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        theirs, ours = (shorten(json.dumps(value)) for value in (self.theirs, self.ours))
        return f"{shorten(self.key)} is {theirs} there, and {ours} here"


class StartConfiguration:
    """The configuration with which SGLang has built a model."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        shape: type[PretrainedConfig] | None,
        *,
        overrides: Mapping[str, Any],
        end_tokens: frozenset[int],
    ) -> None:
        """``raw`` is the start's file. ``shape`` reads it; None: it is compared as it is written.

        ``overrides`` are ``--json-model-override-args``: they hold for every checkpoint.
        """
        self._raw = _overridden(raw, overrides)
        self._shape = shape
        self._overrides = overrides
        self._end_tokens = end_tokens

    @classmethod
    def of(cls, runner: ModelRunner) -> Self | None:
        """Return a model's configuration, or None if its checkpoint shows none on this machine.

        Call at the start: the file may be written over later.
        """
        try:
            model_config, cache = runner.model_config, runner.load_config.download_dir
            folder = find_checkpoint(model_config.model_path, model_config.revision, cache)
            if not (path := folder / CONFIG).is_file():
                return None
            raw = json.loads(path.read_bytes())
            configuration = cls(
                raw,
                _shape_of(raw.get("model_type"), model_config.hf_config),
                overrides=model_config.model_override_args,
                end_tokens=frozenset(model_config.hf_eos_token_id or ()),
            )
            configuration.facts()
            return configuration
        except Exception as error:
            logger.warning(
                "Checkpoints' configurations are not compared with the served one: %s",
                describe(error),
            )
            return None

    @cached_property
    def _ours(self) -> dict[str, Any]:
        try:
            return self._read(self._raw)
        except Exception as error:
            logger.info("%s is compared as it is written: %s", CONFIG, describe(error))
            self._shape = None
            return dict(_flat(self._raw))

    def refuse_another(self, raw: Mapping[str, Any]) -> None:
        """Raise ``Refused`` with keys and both values if ``raw`` asks for another computation."""
        found = list(self._differences(_overridden(raw, self._overrides)))
        if found:
            more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise Refused(
                f"its {CONFIG} asks for another computation than the served one, and an update "
                f"brings weights alone: {'; '.join(map(str, found[:_MOST_NAMED]))}{more}"
            )

    def facts(self) -> dict[str, str]:
        """Return what decides about the computation, by key, for a comparison of two servers.

        Texts that the class does not know are left out: they may be notes of the writer.
        """
        known = self._ours
        if self._shape is not None:
            # some classes have no defaults
            with suppress(TypeError, ValueError):
                known = dict(_flat(self._shape().to_dict()))
        return {
            key: json.dumps(value)
            for key, value in self._ours.items()
            if not _is_off(value) and (key in known or not isinstance(value, str))
        }

    def why_it_ends_elsewhere(
        self, raw: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> str | None:
        """Return a warning if a checkpoint's generation ends with other tokens, or None.

        ``generation`` is its ``generation_config.json``. Like SGLang, join both files' tokens.
        """
        theirs = _tokens(raw.get("eos_token_id")) | _tokens(generation.get("eos_token_id"))
        if theirs <= self._end_tokens and (not generation or theirs == self._end_tokens):
            return None
        return (
            f"the checkpoint ends generation at the tokens {sorted(theirs)}, and this server at "
            f"{sorted(self._end_tokens)}, as since its start: restart it, or name stop_token_ids "
            "in requests"
        )

    def _differences(self, raw: Mapping[str, Any]) -> Iterator[Difference]:
        yield from self._other_quantization(raw)
        kind, own_kind = raw.get("model_type"), self._raw.get("model_type")
        if kind is None:
            # no configuration of transformers: nothing stands for what it leaves out
            ours, theirs = dict(_flat(self._raw)), dict(_flat(raw))
            ours = {key: value for key, value in ours.items() if key in theirs}
        elif kind != own_kind:
            yield Difference("model_type", kind, own_kind)
            return
        else:
            try:
                ours, theirs = self._ours, self._read(raw)
            except Exception as error:
                ours, theirs = dict(_flat(self._raw)), dict(_flat(raw))
                if ours == theirs:
                    raise Refused(f"{CONFIG} cannot be read: {shorten(describe(error))}") from error
        for key in sorted(ours.keys() | theirs.keys()):
            one, other = theirs.get(key), ours.get(key)
            if one == other or (_is_off(one) and _is_off(other)):
                continue
            if key not in ours and isinstance(one, str):
                # a note of the tool that wrote it
                continue
            yield Difference(key, one, other)

    def _read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if self._shape is None:
            return dict(_flat(raw))
        read = self._shape.from_dict(copy.deepcopy(dict(raw))).to_dict()
        # tuples are lists in a file
        return dict(_flat(json.loads(json.dumps(read, default=str))))

    def _other_quantization(self, raw: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the differences. A checkpoint without one has floats, and these are quantized."""
        name, theirs = _quantization(raw)
        _, ours = _quantization(self._raw)
        if not theirs:
            return
        if not ours:
            yield Difference(name, theirs.get("quant_method", "another one"), None)
            return
        one, other = (
            {k: v for k, v in _flat(each) if k.rpartition(".")[2] not in _OF_QUANTIZER}
            for each in (theirs, ours)
        )
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key) and not (
                _is_off(one.get(key)) and _is_off(other.get(key))
            ):
                yield Difference(f"{name}.{key}", one.get(key), other.get(key))


def _shape_of(model_type: Any, own: PretrainedConfig) -> type[PretrainedConfig] | None:
    """Return the class that reads files of ``model_type``, None if there is none.

    SGLang serves some models by a part of their configuration.
    """
    if getattr(own, "model_type", None) == model_type:
        return type(own)
    # its ``get`` finds nothing
    with suppress(KeyError):
        shape: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
        return shape
    return None


def _flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what has influence, by dotted names."""
    for name, value in config.items():
        if name in _WITHOUT_INFLUENCE or name in QUANTIZATION_CONFIGS:
            continue
        if name.startswith("_") or name.endswith(_OF_TRAINING):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield within + name, value


def _quantization(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for part in raw, raw.get("text_config"):
        for name in QUANTIZATION_CONFIGS:
            if isinstance(part, Mapping) and isinstance(found := part.get(name), Mapping):
                return name, found
    return QUANTIZATION_CONFIGS[0], {}


def _overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the values of ``overrides``, which may have a dict's values in part."""
    found = dict(raw)
    for name, value in overrides.items():
        if name in _ROPES:
            name = next((rope for rope in _ROPES if isinstance(raw.get(rope), Mapping)), name)
        if isinstance(value, Mapping) and isinstance(before := found.get(name), Mapping):
            value = _overridden(before, value)
        found[name] = value
    return found


def _tokens(value: Any) -> frozenset[int]:
    found = value if isinstance(value, list) else [value]
    return frozenset(token for token in found if isinstance(token, int))


def _is_off(value: Any) -> bool:
    return value is None or value is False
