"""Model classes are updated as ``docs/families.md`` says (``tests/families``)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.families import row, table
from tests.families.result import REFUSED, WRONG, Result


def test_document_lists_every_class_once() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", table.DOCUMENT.read_text(), re.MULTILINE)
    assert listed == table.classes(), "run make families"


def test_no_class_is_updated_wrongly() -> None:
    assert not [name for name, result in table.read().items() if result.kind == WRONG]


def test_outcome_without_servers_replaces_another_one_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one would hide that a class is updated in another way by now."""
    document = tmp_path / "families.md"
    document.write_text(table.DOCUMENT.read_text())
    monkeypatch.setattr(table, "DOCUMENT", document)
    known = table.read()["LlamaForCausalLM"]
    table.write({"LlamaForCausalLM": replace(known, why="alone")}, over_servers=False)
    assert table.read()["LlamaForCausalLM"] == known
    refused = Result(REFUSED, "its proof fails")
    table.write({"LlamaForCausalLM": refused}, over_servers=False)
    assert table.read()["LlamaForCausalLM"] == refused


# experts with norms of whole heads; a tower of images
@pytest.mark.parametrize("name", ["OlmoeForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_served_class_differs_from_its_row(name: str, tmp_path: Path) -> None:
    assert row.run(name, tmp_path) == table.read()[name]


# norms held twice; a loader of all tensors at once; weights that no checkpoint brings; a head that
# the loader normalizes; weights that the loader reads again
@pytest.mark.parametrize(
    "name",
    [
        "Gemma3ForCausalLM",
        "Step3p5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "BailingMoeForCausalLM",
        "Mamba2ForCausalLM",
    ],
)
def test_loaded_class_differs_from_its_row(name: str, tmp_path: Path) -> None:
    assert row.run(name, tmp_path, servers=False).kind == table.read()[name].kind
