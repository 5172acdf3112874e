"""A checkpoint whose configuration asks for another computation is refused by key and values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3VLConfig

from sglang_inflight.scheduler.update.checks.configuration import StartConfiguration
from sglang_inflight.scheduler.update.sources.disk import Folder, check_configuration
from sglang_inflight.scheduler.update.sources.regular_file import read_whole
from sglang_inflight.vocabulary.errors import Refused

# configurations as transformers 4 writes them
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "eos_token_id": 2,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": ROPE, "num_hidden_layers": 2}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
DEEPSEEK = {"model_type": "deepseek_v3", "rope_theta": 1e4, "rope_scaling": YARN}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {"num_hidden_layers": 2, "rope_theta": 5e6, "model_type": "qwen3_vl_text"},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def served(
    raw: dict[str, Any] = QWEN,
    shape: type[PretrainedConfig] | None = Qwen3Config,
    *,
    end_tokens: tuple[int, ...] = (2,),
    **overrides: Any,
) -> StartConfiguration:
    return StartConfiguration(raw, shape, overrides=overrides, end_tokens=frozenset(end_tokens))


OTHERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"rms_norm_eps": 1e-1}, ("rms_norm_eps is 0.1 there", "1e-06 here")),
    ({"num_hidden_layers": 1}, ("num_hidden_layers is 1 there", "2 here")),
    ({"rope_theta": 1e4}, ("rope_theta is 10000.0 there", "1000000.0 here")),
    ({"rope_scaling": {**YARN, "rope_type": "yarn"}}, ("rope_parameters.factor is 40",)),
    ({"hidden_act": "gelu"}, ('hidden_act is "gelu" there', '"silu" here')),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings is true there",)),
    ({"use_sliding_window": True, "sliding_window": 8}, ("sliding_window is 8 there",)),
    ({"model_type": "llama"}, ('model_type is "llama" there', '"qwen3" here')),
    ({"quantization_config": FP8}, ('quantization_config is "fp8" there', "null here")),
    ({"attention_bias": True}, ("attention_bias is true there",)),
    # unknown to the class, and read by name
    ({"logit_scale": 2.0}, ("logit_scale is 2.0 there", "null here")),
    # a value that the class does not take
    ({"num_hidden_layers": "1"}, ('num_hidden_layers is "1" there',)),
]


@pytest.mark.parametrize("shape", [Qwen3Config, None], ids=["read", "as written"])
@pytest.mark.parametrize(("change", "words"), OTHERS, ids=[next(iter(c)) for c, _ in OTHERS])
def test_another_computation_is_refused_by_key_and_both_values(
    change: dict[str, Any], words: tuple[str, ...], shape: type[PretrainedConfig] | None
) -> None:
    with pytest.raises(Refused) as refused:
        served(shape=shape).refuse_another({**QWEN, **change})
    if shape is not None:
        assert all(word in str(refused.value) for word in words), refused.value


def test_left_out_value_stands_for_its_default() -> None:
    asked = {key: value for key, value in QWEN.items() if key != "rope_theta"}
    with pytest.raises(Refused, match=r"rope_theta is 10000\.0 there, and 1000000\.0 here"):
        served().refuse_another(asked)


SAME: list[dict[str, Any]] = [
    {"transformers_version": "5.19.0", "torch_dtype": "float32", "dtype": "float32"},
    {"_name_or_path": "/a/b", "use_cache": False, "unsloth_version": "2026.1"},
    {"bos_token_id": 7, "eos_token_id": [7], "pad_token_id": 7},
    {"attention_dropout": 0.1, "initializer_range": 0.5, "output_router_logits": True},
    {"temperature": 0.5, "max_length": 9},
    {"use_mrope": False, "head_dim": 128},
]


@pytest.mark.parametrize("change", SAME, ids=[next(iter(change)) for change in SAME])
def test_value_without_influence_is_taken(change: dict[str, Any]) -> None:
    served().refuse_another({**QWEN, **change})


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (QWEN, Qwen3Config),
        (LLAMA, LlamaConfig),
        (DEEPSEEK, DeepseekV3Config),
        (VISION, Qwen3VLConfig),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_form_of_another_transformers_is_the_same(
    raw: dict[str, Any], shape: type[PretrainedConfig], tmp_path: Path
) -> None:
    """A trainer with transformers 5 saves what it has read in the form of transformers 4."""
    shape.from_dict(raw).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved
    served(raw, shape).refuse_another(saved)
    served(saved, shape).refuse_another(raw)


def test_nested_value_is_compared() -> None:
    asked = {**VISION, "text_config": {**VISION["text_config"], "rope_theta": 1e4}}
    with pytest.raises(Refused, match=r"text_config\.rope_parameters\.rope_theta is 10000\.0"):
        served(VISION, Qwen3VLConfig).refuse_another(asked)


def test_floats_for_a_quantized_checkpoint_are_taken() -> None:
    served({**QWEN, "quantization_config": FP8}).refuse_another(QWEN)


def test_another_quantization_is_refused() -> None:
    other = {**QWEN, "quantization_config": {**FP8, "weight_block_size": [64, 64]}}
    with pytest.raises(Refused, match=r"weight_block_size is \[64, 64\] there, and \[128, 128\]"):
        served({**QWEN, "quantization_config": FP8}).refuse_another(other)


def test_value_that_the_servers_arguments_override_is_not_compared() -> None:
    configuration = served(rope_scaling={"factor": 4.0, "rope_type": "yarn"})
    yarn = {"rope_type": "yarn", "factor": 4.0}
    configuration.refuse_another(QWEN)
    configuration.refuse_another({**QWEN, "rope_scaling": yarn})
    with pytest.raises(Refused, match="rope_theta"):
        configuration.refuse_another({**QWEN, "rope_theta": 1e4, "rope_scaling": yarn})


def test_file_that_its_class_does_not_read_is_compared_as_it_is_written() -> None:
    raw = {**QWEN, "num_hidden_layers": "2"}
    configuration = served(raw)
    configuration.refuse_another(raw)
    with pytest.raises(Refused, match=r'num_hidden_layers is 2 there, and "2" here'):
        configuration.refuse_another(QWEN)


def test_file_of_no_model_type_is_compared_in_what_it_says() -> None:
    served().refuse_another({"architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(Refused, match="rms_norm_eps"):
        served().refuse_another({"rms_norm_eps": 0.1})


@pytest.mark.parametrize(
    ("config", "generation", "warns"),
    [
        (2, None, False),
        (2, [2], False),
        (2, [2, 5], True),
        (5, None, True),
        (2, 5, True),
        (None, None, False),
    ],
)
def test_other_end_token_is_a_warning(config: Any, generation: Any, warns: bool) -> None:
    given = {} if generation is None else {"eos_token_id": generation}
    warning = served().why_it_ends_elsewhere({"eos_token_id": config}, given)
    assert (warning is not None) is warns
    if warning is not None:
        assert "5" in warning
        assert "[2]" in warning


def test_file_of_fewer_end_tokens_than_the_start_is_no_warning() -> None:
    """A trainer saves the model's configuration, and no ``generation_config.json``."""
    configuration = served(end_tokens=(2, 5))
    assert configuration.why_it_ends_elsewhere({"eos_token_id": 2}, {}) is None
    assert configuration.why_it_ends_elsewhere({"eos_token_id": 2}, {"eos_token_id": 2})


def test_servers_of_one_computation_have_the_same_facts(tmp_path: Path) -> None:
    Qwen3Config.from_dict({**QWEN, "written_by": "a tool"}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert served(saved).facts() == served().facts()
    other = served({**QWEN, "rope_theta": 1e4}).facts()
    assert other.items() - served().facts().items() == {("rope_parameters.rope_theta", "10000.0")}


# ---- files --------------------------------------------------------------------------------


def runner_of(model_config: Any) -> Any:
    return SimpleNamespace(
        model_config=model_config, load_config=SimpleNamespace(download_dir=None)
    )


@pytest.fixture
def start(tmp_path: Path) -> tuple[Any, StartConfiguration]:
    """The model at a server's start, as far as files are concerned."""
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    model_config: Any = SimpleNamespace(
        model_path=str(folder),
        revision=None,
        hf_config=Qwen3Config.from_dict(QWEN),
        model_override_args={},
        hf_eos_token_id={2},
    )
    found = StartConfiguration.of(runner_of(model_config))
    assert found is not None
    return runner_of(model_config), found


def check(folder: Path, start: tuple[Any, StartConfiguration]) -> list[str]:
    runner, configuration = start
    said: list[str] = []
    opened = Folder(str(folder), named=str(folder))
    with closing(SimpleNamespace(close=opened.close)):
        check_configuration(opened, runner, configuration, said.append)
    return said


def test_start_is_compared_even_if_its_file_was_written_over(
    tmp_path: Path, start: tuple[Any, StartConfiguration]
) -> None:
    (tmp_path / "start" / "config.json").write_text(json.dumps({**QWEN, "rope_theta": 1e4}))
    with pytest.raises(Refused, match="rope_theta"):
        check(tmp_path / "start", start)


def test_part_that_sglang_serves_is_compared_as_the_whole(tmp_path: Path) -> None:
    """SGLang replaces some configurations by their ``text_config``."""
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    model_config: Any = SimpleNamespace(
        model_path=str(tmp_path),
        revision=None,
        hf_config=Qwen3VLConfig.from_dict(VISION).text_config,
        model_override_args={},
        hf_eos_token_id=None,
    )
    configuration = StartConfiguration.of(runner_of(model_config))
    assert configuration is not None
    (tmp_path / "saved").mkdir()
    Qwen3VLConfig.from_dict(VISION).save_pretrained(tmp_path / "saved")
    configuration.refuse_another(json.loads((tmp_path / "saved" / "config.json").read_text()))


def test_folder_without_a_configuration_is_taken(
    tmp_path: Path, start: tuple[Any, StartConfiguration]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert check(tmp_path, start) == []


def replace(path: Path, content: bytes) -> None:
    another = path.with_name("another")
    another.write_bytes(content)
    another.replace(path)


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.parametrize("change", [replace, append])
def test_configuration_changed_after_the_check_of_its_size_is_not_read(
    tmp_path: Path,
    start: tuple[Any, StartConfiguration],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, bytes], None],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    checked, left = path.stat().st_ino, [json.dumps({**QWEN, "rope_theta": 1e4}).encode()]

    def then_change(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look_and_change(*arguments: Any, **options: Any) -> os.stat_result:
            found = look(*arguments, **options)
            if found.st_ino == checked and left:
                change(path, left.pop())
            return found

        return look_and_change

    monkeypatch.setattr(os, "stat", then_change(os.stat))
    monkeypatch.setattr(os, "fstat", then_change(os.fstat))
    assert check(tmp_path, start) == []
    assert not left


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configuration_that_cannot_be_read_is_refused(
    tmp_path: Path, start: tuple[Any, StartConfiguration], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    path = tmp_path / name
    path.write_bytes(b" " * (4 << 20) + b"{}")
    with pytest.raises(Refused, match=rf"{name} has 4194306 bytes, at most 4194304 are allowed"):
        check(tmp_path, start)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(Refused, match=rf"{name} cannot be opened: No such file"):
        check(tmp_path, start)


def test_failure_of_the_file_system_is_not_a_missing_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        read_whole(str(tmp_path / "file" / "config.json"), "config.json", 1)
    assert read_whole(str(tmp_path / "config.json"), "config.json", 1) is None


def test_end_token_of_the_generation_config_is_told(
    tmp_path: Path, start: tuple[Any, StartConfiguration]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    (warning,) = check(tmp_path, start)
    assert "[2, 9]" in warning


def test_missing_or_unreadable_file_of_the_start_compares_nothing(tmp_path: Path) -> None:
    model_config: Any = SimpleNamespace(model_path=str(tmp_path), revision=None)
    assert StartConfiguration.of(runner_of(model_config)) is None
    (tmp_path / "config.json").write_text("{")
    assert StartConfiguration.of(runner_of(model_config)) is None
