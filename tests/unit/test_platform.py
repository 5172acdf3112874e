"""Choices of the reference platform, with and without a choice by the user.

Each case runs in a process of its own: the platform sets the environment of later processes, and
torch reads the environment at its import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins import PLATFORM_PLUGINS_GROUP, _get_excluded_dists

from harness.marker import CONFIG
from sglang_inflight_tools import platform
from sglang_inflight_tools.cpu import WEIGHTS_A_THREAD, fast_dtype, threads_for
from sglang_inflight_tools.platform import ReferencePlatform
from tests.support import forked

# the most features of a CPU without bfloat16
OLD_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
OWN = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "3"}
ISAS = ("AVX2", "avx512_core", "AVX512_CORE_VNNI")
# a run of the tests has others of its own
OPEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")

# all cases share one import: each forks from it, with an environment of its own
SERVE = """
import gc, json, os, sys
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import prepare_server_args
# a collection in a fork would copy and visit all that SGLang's import has made
gc.disable()
for name in {OPEN}:
    os.environ.pop(name, None)
for arguments, environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(environment)
        args = prepare_server_args(arguments)
        args.resolve_once()
        chosen = resolved_view(args)
        served = ModelConfig.from_server_args(args).dtype
        found = {"dtype": chosen.dtype, "served": str(served), "sleeps": chosen.sleep_on_idle}
        print(json.dumps(found | {"env": dict(os.environ)}), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""

# torch's kernels read the instructions at their first use, which is after the fork
ASK_EACH = """
import json, os, sys
from sglang_inflight_tools.cpu import fast_dtype
found = {}
for isa in sys.argv[1:]:
    receive, send = os.pipe()
    if os.fork() == 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = isa
        os.write(send, str(fast_dtype()).encode())
        os._exit(0)
    assert os.wait()[1] == 0
    os.close(send)
    with os.fdopen(receive) as said:
        found[isa] = said.read()
print(json.dumps(found))
"""

# one thread waits for a sleeping thread: only a spinning thread uses CPU time
WAIT = """
import time, torch
torch.set_num_threads(2)
torch.randn(800, 800) @ torch.randn(800, 800)
times = []
for _ in range(20):
    torch.randn(400, 400) @ torch.randn(400, 400)
    began = time.process_time()
    time.sleep(0.01)
    times.append(time.process_time() - began)
print(sum(times))
"""


def _run(code: str, *arguments: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in OPEN} | environment
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


Chosen = dict[str, Any]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> list[Chosen]:
    """Cases: no choice, the user's choice, and attention DP in its two spellings. The model is
    tiny, and says bfloat16.
    """
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--model-path", str(model), "--skip-tokenizer-init"]
    cases = [(flags, {}), ([*flags, "--dtype", "bfloat16"], OWN)]
    attention_dp = ("--attn-dp-size",), ("--enable-dp-attention", "--dp-size")
    cases += [([*flags, "--tp-size", "2", *words, "2"], {}) for words in attention_dp]
    # SGLang prints lines of its own
    code = SERVE.replace("{OPEN}", repr(OPEN))
    lines = forked.run(["-c", code, json.dumps(cases)], env=OLD_CPU, wait_s=240).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_platform_chooses_cpu_defaults(chosen: list[Chosen]) -> None:
    found = chosen[0]
    assert (found["dtype"], found["served"]) == ("float32", "torch.float32")
    assert found["env"]["OMP_WAIT_POLICY"] == "passive"
    assert found["env"]["OMP_NUM_THREADS"] == "1"
    assert found["sleeps"]


def test_platform_keeps_users_choices(chosen: list[Chosen]) -> None:
    found = chosen[1]
    assert (found["dtype"], found["served"]) == ("bfloat16", "torch.bfloat16")
    assert "OMP_WAIT_POLICY" not in found["env"]
    assert OWN.items() <= found["env"].items()


def test_attention_dp_ranks_never_sleep(chosen: list[Chosen]) -> None:
    assert [found["sleeps"] for found in chosen] == [True, True, False, False]


def test_quantized_weights_keep_their_dtype() -> None:
    """The kernels of quantized weights choose the dtype."""
    server_args: Any = SimpleNamespace(dtype="auto", quantization=None)
    config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    ReferencePlatform()._choose_dtype(server_args, config)
    assert server_args.dtype == "auto"


def test_passive_threads_use_no_cpu_time() -> None:
    """torch's OpenMP follows the chosen policy."""
    asleep, awake = (float(_run(WAIT, OMP_WAIT_POLICY=policy)) for policy in ("passive", "active"))
    assert asleep < awake


@pytest.mark.parametrize(
    ("weights", "cores", "threads"),
    [
        (64 * 128, 16, 1),
        (576 * 1536, 16, 1),
        (4 * WEIGHTS_A_THREAD, 16, 4),
        (4 * WEIGHTS_A_THREAD, 2, 2),
    ],
)
def test_threads_follow_matrix_size(weights: int, cores: int, threads: int) -> None:
    assert threads_for(weights, cores) == threads


@pytest.fixture(scope="module")
def said_by_isa() -> dict[str, str]:
    said: dict[str, str] = json.loads(forked.run(["-c", ASK_EACH, *ISAS], wait_s=240))
    return said


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_off_without_its_instructions(isa: str, said_by_isa: dict[str, str]) -> None:
    """On a CPU without bfloat16 the reason differs, and the dtype is the same."""
    said = said_by_isa[isa]
    assert "dtype='float32'" in said
    if fast_dtype().dtype == "bfloat16":
        assert f"ONEDNN_MAX_CPU_ISA={isa}" in said


@pytest.fixture
def gpu_without_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU unusable by torch."""
    monkeypatch.setattr(platform, "DEVICES", tmp_path)
    monkeypatch.setattr(platform, "_has_accelerator", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    return tmp_path


def test_unusable_gpu_is_not_replaced_by_cpu(
    gpu_without_driver: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert platform.activate() is None
    assert f"{gpu_without_driver}/nvidia0 is on this machine" in caplog.text
    assert "SGLANG_PLATFORM=inflight_reference" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_PLATFORM", "inflight_reference"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_cpu_can_be_chosen_beside_a_gpu(
    gpu_without_driver: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert platform.activate() == "sglang_inflight_tools.platform:ReferencePlatform"


def test_machine_without_gpu_uses_cpu(gpu_without_driver: Path) -> None:
    (gpu_without_driver / "nvidia0").unlink()
    assert platform.activate() == "sglang_inflight_tools.platform:ReferencePlatform"


def test_entry_point_matches_platform_name() -> None:
    (ours,) = distribution("sglang-inflight-tools").entry_points.select(
        group=PLATFORM_PLUGINS_GROUP
    )
    assert ours.name == platform.NAME


def test_another_platform_leaves_our_plugin_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang leaves out the plugins of a distribution with a platform that is not chosen."""
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    left_out = _get_excluded_dists()
    assert "sglang-inflight-tools" in left_out
    assert "sglang-inflight" not in left_out
