"""The pack for a bare machine has what a server imports, and no more than 64 MiB."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import torch

from benchmarks.gpu.bare import contents, kernels, pack, stubs, unpack
from benchmarks.gpu.bare.check_imports import versions


def test_pack_over_the_limit_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "large.whl").write_bytes(bytes(3 << 20))
    (tmp_path / "small.txt").write_bytes(bytes(1 << 20))
    by_file = contents.sizes(tmp_path)
    assert [*by_file] == ["wheels/large.whl", "small.txt"]
    assert contents.check_size(by_file, 4 << 20) == 4 << 20
    with pytest.raises(ValueError, match=r"4\.0 MiB, and 3\.0 .* wheels/large\.whl \(3\.0 MiB\)"):
        contents.check_size(by_file, 3 << 20)


def test_sglang_sources_are_without_extensions_caches_and_diffusion(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    kept = ["kernels/csrc/a.cuh", "srt/moe/E=8,device_name=H100.json", "srt/server_args.py"]
    left = [
        "multimodal_gen/runtime.py",
        "srt/__pycache__/server_args.cpython-311.pyc",
        "srt/_server.cpython-311-x86_64-linux-gnu.so",
        "test/runners.py",
    ]
    for name in (*kept, *left):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    found = [str(file.relative_to(package)) for file in contents.sglang_files(package)]
    assert found == kept


def test_results_of_earlier_runs_are_not_packed(tmp_path: Path) -> None:
    for name in ("benchmarks/gpu/step.py", "benchmarks/gpu/results/2030/server.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.name for file in contents.project_files(tmp_path)] == ["step.py"]


def test_project_brings_patches_and_steps_and_nothing_compiled() -> None:
    found = {str(file.relative_to(pack.ROOT)) for file in contents.project_files(pack.ROOT)}
    assert "sglang_inflight/plugin.py" in found
    assert "benchmarks/gpu/step.py" in found
    assert "tools/sglang_inflight_tools/platform.py" in found
    assert any(name.startswith("patches/sglang-") for name in found)
    assert not [name for name in found if "__pycache__" in name or name.endswith((".so", ".pyc"))]


def test_metadata_tells_entry_points_and_no_folder_of_this_machine() -> None:
    names = ("METADATA", "RECORD", "direct_url.json", "entry_points.txt", "licenses/LICENSE")
    files = [PurePosixPath("ours-0.1.dist-info", name) for name in names]
    found = contents.metadata_files([*files, PurePosixPath("__editable___ours_finder.py")])
    assert [file.name for file in found] == ["METADATA", "entry_points.txt"]


def test_every_distribution_of_the_pack_is_in_this_environment() -> None:
    assert versions()[1] == []


def test_extras_do_not_count_as_required() -> None:
    requirements = [
        "jinja2>=3",
        'pytest; extra == "test"',
        "cuda-toolkit[nvrtc,cudart]==13.0.2; platform_system == 'Linux'",
    ]
    assert pack.required(requirements) == ["jinja2", "cuda-toolkit"]


def test_check_of_imports_sees_only_linked_distributions(tmp_path: Path) -> None:
    pack.link_distributions(["msgspec"], tmp_path)
    program = "import msgspec, importlib.util; print(importlib.util.find_spec('psutil'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"


def test_folder_with_other_files_is_not_emptied_for_a_pack(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a pack"):
        pack.make(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_stub_gives_every_name_and_no_call(tmp_path: Path) -> None:
    for path, text in stubs.stub_files("notebook", ["notebook.display"]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    program = """
import inspect
from notebook.display import HTML
import notebook
assert not hasattr(notebook, "__wrapped__")
inspect.unwrap(HTML)
try:
    HTML("x")
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "notebook.display.HTML is not in the pack\n"


def test_stub_of_another_packages_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"other\.part is no submodule of notebook"):
        stubs.stub_files("notebook", ["other.part"])


def test_wheels_commands_are_left_out_and_its_modules_are_not() -> None:
    assert unpack.importable("orjson/__init__.py") == "orjson/__init__.py"
    assert unpack.importable("tool-1.data/purelib/tool/__init__.py") == "tool/__init__.py"
    assert unpack.importable("tool-1.data/scripts/tool") is None


def _pack_of_wheels(folder: Path, python: str) -> Path:
    for place, name in (("wheels", "ours"), ("spares", "pytest"), ("spares", "absent")):
        (folder / place).mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / place / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
    for name in unpack.ARCHIVES:
        tarfile.open(folder / name, "w:xz").close()
    (folder / unpack.LIST).write_text(json.dumps({"python": python}))
    return folder


def test_spare_of_an_installed_distribution_stays_packed(tmp_path: Path) -> None:
    here = ".".join(platform.python_version_tuple()[:2])
    site = tmp_path / "site"
    unneeded = unpack.unpack(_pack_of_wheels(tmp_path / "pack", here), site)
    assert unneeded == ["pytest-1.0-py3-none-any.whl"]
    assert sorted(file.name for file in site.iterdir()) == ["absent.py", "ours.py"]


def test_pack_for_another_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"The pack is for Python 3\.99 on x86_64"):
        unpack.unpack(_pack_of_wheels(tmp_path, "3.99"), tmp_path / "site")


def test_attention_over_two_parts_is_merged_as_over_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 2, 8, generator=generator)
    states = torch.randn(8, 3, generator=generator)
    whole = scores.softmax(-1) @ states
    parts = [(scores[..., a:b], states[a:b]) for a, b in ((0, 3), (3, 8))]
    first, second = [(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in parts]
    values, log_sums = torch.empty_like(whole), torch.empty(5, 2)
    kernels.merge_state_v2(*first, *second, values, log_sums)
    torch.testing.assert_close(values, whole)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))


def test_merge_with_an_empty_part_is_the_other_part_and_never_nan() -> None:
    some, none = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    empty = torch.full((1, 1), -torch.inf)
    values, log_sums = torch.empty(1, 1, 4), torch.empty(1, 1)
    kernels.merge_state_v2(some, torch.zeros(1, 1), none, empty, values, log_sums)
    assert torch.equal(values, some)
    kernels.merge_state_v2(none, empty, none, empty, values, log_sums)
    assert torch.equal(values, none)


def test_kernels_write_what_torch_computes() -> None:
    gate_and_up = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    gate, up = gate_and_up[:, :4], gate_and_up[:, 4:]
    out = torch.empty(3, 4)
    kernels.silu_and_mul(out, gate_and_up)
    torch.testing.assert_close(out, gate * gate.sigmoid() * up)
    kernels.gelu_and_mul(out, gate_and_up)
    torch.testing.assert_close(out, gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up)
    by_expert = torch.arange(12.0).view(2, 3, 2)
    total = torch.empty(2, 2)
    kernels.moe_sum_reduce(by_expert, total, 0.5)
    assert total.tolist() == [[3.0, 4.5], [12.0, 13.5]]
