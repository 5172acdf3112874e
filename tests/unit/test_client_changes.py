"""A trainer's changes make the next version of the last one, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang_inflight.client import Snapshot, changes_since, write_changes
from sglang_inflight.client import changes as changes_module
from sglang_inflight.client.base import Base, NotFromBase, Version
from sglang_inflight.client.changes import find_change, in_halves
from sglang_inflight.vocabulary.sparse import index_dtype

Weights = dict[str, torch.Tensor]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
]
SHAPES: list[list[int]] = [[], [0], [1], [37], [5, 7], [3, 4, 5], [2, 0, 3]]


def bits_of(tensor: torch.Tensor) -> list[int]:
    bits: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return bits


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, bits_of(one)) == (other.shape, other.dtype, bits_of(other))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors of a few elements, within rows and between them."""
    monkeypatch.setattr(changes_module, "_PIECE", 6)


def random_bits(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return any bit patterns of ``dtype``: NaN payloads and signed zeros too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    of_bytes = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return of_bytes.view(dtype).view(shape)


@st.composite
def versions(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Draw two versions of a model, in any layout of memory."""
    old, new = {}, {}
    for at in range(draw(st.integers(1, 4))):
        name, dtype, shape = f"w{at}", draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        old[name] = random_bits(shape, dtype, draw(st.integers(0, 3)))
        new[name] = old[name].clone()
        if count := new[name].numel():
            for place in draw(st.lists(st.integers(0, count - 1), max_size=count)):
                other = random_bits([count], dtype, draw(st.integers(0, 3)))
                new[name].view(-1)[place] = other[place]
        if draw(st.booleans()):
            new[name] = new[name].movedim(0, -1).contiguous().movedim(-1, 0) if shape else new[name]
    return old, new


@settings(max_examples=150, deadline=None)
@given(versions())
def test_changes_make_the_next_version_of_the_last_one(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    made = {name: tensor.clone() for name, tensor in old.items()}
    before = {name: tensor.clone() for name, tensor in old.items()}
    for (name, indices), (_, values) in in_halves(changes_since(old, new.items())):
        base = name.removesuffix(".indices")
        assert indices.dtype == torch.int32
        assert indices.shape == values.shape
        assert len(indices)
        assert indices.tolist() == sorted(set(indices.tolist()))
        assert values.dtype == new[base].dtype
        flat, at = made[base].view(-1), indices.long()
        assert all(bits_of(flat[i]) != bits_of(values[n]) for n, i in enumerate(at.tolist()))
        for place, value in zip(at.tolist(), values, strict=True):
            flat[place] = value
    assert all(are_same(made[name], new[name]) for name in new)
    assert all(are_same(old[name], before[name]) for name in old), "the last version was written"


@settings(max_examples=50, deadline=None)
@given(versions())
def test_snapshot_becomes_each_version(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    snapshot = Snapshot(old)
    for version in new, old, new:
        changes = [name for name, _ in snapshot.advance(version)]
        differ = {name for name in old if bits_of(old[name]) != bits_of(new[name])}
        assert {name.rpartition(".")[0] for name in changes} == differ
        assert all(are_same(snapshot[name], version[name]) for name in version)


def test_other_payload_of_nan_and_other_sign_of_zero_are_changes() -> None:
    old = torch.tensor([0, 0x7FC0, 0x3F80, 0x7F80], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x3F80, 0x7F80], dtype=torch.int16).view(torch.bfloat16)
    change = find_change("w", old, new)
    assert change is not None
    assert change.indices.tolist() == [0, 1]
    assert bits_of(change.values) == bits_of(new[:2])


def test_position_beyond_int32_gets_int64() -> None:
    assert index_dtype(1 << 31) == torch.int32
    assert index_dtype((1 << 31) + 1) == torch.int64


def test_search_ends_when_the_tensor_itself_is_smaller() -> None:
    old, new = torch.zeros(100), torch.zeros(100)
    new[:50] = 1
    assert find_change("w", old, new, most_bytes=400) is not None
    assert find_change("w", old, new, most_bytes=399) is None


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        (
            {"w": torch.ones(2)},
            {"w": torch.ones(3)},
            ValueError,
            r"'w' is .*\[3\], and was .*\[2\]",
        ),
        ({"w": torch.ones(2)}, {"w": torch.ones(2).half()}, ValueError, "'w' is .*float16"),
        ({}, {"w": torch.ones(2)}, ValueError, "'w' was not there before"),
        ({"w": torch.ones(2)}, {}, ValueError, "'w' was there before, and is missing"),
        ({"w": torch.ones(2)}, [("w", torch.ones(2))] * 2, ValueError, "'w' comes twice"),
        ({"w": torch.ones(2)}, {"w": [1.0]}, TypeError, "'w' is a list"),
        (
            {"w": torch.ones(2, dtype=torch.complex128)},
            {"w": torch.ones(2, dtype=torch.complex128)},
            ValueError,
            "'w' is of torch.complex128",
        ),
    ],
)
def test_versions_that_do_not_fit_name_the_tensor(
    old: Any, new: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        list(changes_since(old, new))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
def test_changes_of_a_gpus_tensor_are_found_on_the_gpu() -> None:
    old = torch.randn(100, 7, dtype=torch.bfloat16)
    new = old.cuda()
    new[3:5] += 1
    snapshot = Snapshot({"w": old})
    sent = dict(snapshot.advance({"w": new}))
    assert {tensor.device.type for tensor in sent.values()} == {"cuda"}
    assert sent["w.indices"].tolist() == list(range(21, 35))
    assert are_same(snapshot["w"], new.cpu())


# ---- a sender's version --------------------------------------------------------------------


def test_tensor_goes_whole_if_a_change_is_larger_or_not_taken() -> None:
    old = {
        "few": torch.zeros(100, dtype=torch.bfloat16),
        "many": torch.zeros(100, dtype=torch.bfloat16),
        "infinite": torch.zeros(100, dtype=torch.bfloat16),
        "eight bits": torch.zeros(100).to(torch.float8_e4m3fn),
        "counts": torch.zeros(100, dtype=torch.int64),
        "same": torch.zeros(100),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["few"][:33] = 1
    new["many"][:34] = 1
    new["infinite"][0] = torch.inf
    new["eight bits"][0] = 1
    new["counts"][0] = 1
    snapshot = Snapshot(old)
    pieces = list(Version([*new.items(), ("new", torch.ones(1))], snapshot).changes(partial=False))
    assert [name for piece in pieces for name, _ in piece.tensors] == [
        "few.indices", "few.values", "many", "infinite", "eight bits", "counts", "new",
    ]  # fmt: skip
    assert all(are_same(snapshot[name], tensor) for name, tensor in new.items())


def test_tensors_that_servers_take_whole_alone_are_sent_whole_at_once() -> None:
    """Servers finish them together, so the unchanged ones have to come, too."""
    old = {name: torch.zeros(100) for name in ("finished", "beside it", "moved", "same")}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["finished"][0] = new["moved"][0] = 1
    version = Version(new.items(), Snapshot(old))
    pieces = version.changes(partial=False, whole={"finished", "beside it"})
    assert [name for piece in pieces for name, _ in piece.tensors] == [
        "finished", "beside it", "moved.indices", "moved.values",
    ]  # fmt: skip


def test_unchanged_version_sends_nothing() -> None:
    weights = {"large": torch.zeros(100), "small": torch.zeros(10)}
    assert not list(Version(weights.items(), Snapshot(weights)).changes(partial=False))


def test_missing_tensor_ends_the_changes_of_a_whole_version() -> None:
    weights = {"a": torch.zeros(100), "b": torch.zeros(10)}
    a = [("a", torch.ones(100))]
    with pytest.raises(NotFromBase, match="'b' was there before"):
        list(Version(a, Snapshot(weights)).changes(partial=False))
    assert len(list(Version(a, Snapshot(weights)).changes(partial=True))) == 1


def test_second_try_sends_tensors_already_taken() -> None:
    """The trainer's generator runs once, and goes on where the first try gave up."""
    old = {f"w{at}": torch.zeros(100) for at in range(4)}
    new = {name: tensor + at for at, (name, tensor) in enumerate(old.items())}
    del new["w3"]
    made: list[str] = []

    def trainer() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            made.append(name)
            yield name, tensor

    snapshot = Snapshot(old)
    version = Version(trainer(), snapshot)
    assert not version.can_be_sent_again
    changes = version.changes(partial=False)
    next(changes)
    del changes
    assert version.can_be_sent_again
    assert made == ["w0", "w1"]
    sent = {name: tensor for piece in version.whole() for name, tensor in piece.tensors}
    assert made == list(new) == list(sent) == list(snapshot)
    assert all(are_same(sent[name], tensor) for name, tensor in new.items())


def test_version_of_a_failed_generator_is_not_sent_again() -> None:
    def trainer() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(1)
        raise ZeroDivisionError

    version = Version(trainer(), Snapshot())
    with pytest.raises(ZeroDivisionError):
        list(version.changes(partial=False))
    assert not version.can_be_sent_again


def test_base_is_served_only_with_equal_digests_on_every_rank() -> None:
    base = Base({"a": [(0, 0, 0, "1"), (0, 1, 0, "2")]}, is_whole=True, selector=None)
    base.require_served(dict(base.digests))
    others: list[list[tuple[int, int, int, str | None]]] = [
        [(0, 0, 0, "1"), (0, 1, 0, "3")],
        [(0, 0, 0, "1"), (0, 1, 0, None)],
        [(0, 0, 0, "1")],
    ]
    for other in others:
        with pytest.raises(NotFromBase, match="a serves other weights"):
            base.require_served({"a": other})


def test_base_is_served_by_the_same_servers_alone() -> None:
    """A server may have left the fleet since the commit, and another one have joined it."""
    one: list[tuple[int, int, int, str | None]] = [(0, 0, 0, "1")]
    base = Base({"a": one, "b": one}, is_whole=True, selector=None)
    with pytest.raises(NotFromBase, match="b serves other weights"):
        base.require_served({"a": one})
    with pytest.raises(NotFromBase, match="c serves other weights"):
        base.require_served({"a": one, "b": one, "c": one})


def test_base_of_a_part_fits_no_whole_version() -> None:
    base = Base({}, is_whole=False, selector=None)
    assert base.fits(True, None)
    assert not base.fits(False, None)
    assert not base.fits(True, "draft")


# ---- a folder -------------------------------------------------------------------------------


def read_folder(folder: Path) -> Iterator[Weights]:
    """Yield the tensors of each file, checked against the manifest."""
    manifest = json.loads((folder / "sparse.json").read_text())
    assert manifest.keys() == {"format", "format_version", "base_version", "files"}
    assert (manifest["format"], manifest["format_version"]) == ("sglang-inflight-sparse", 1)
    assert {path.name for path in folder.iterdir()} == {"sparse.json", *manifest["files"]}
    for name, described in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert described == {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
        yield load_file(folder / name)


def test_folder_holds_all_changes_in_files_of_whole_pairs(tmp_path: Path) -> None:
    old = {f"w{at}": torch.zeros(50, dtype=torch.bfloat16) for at in range(7)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for at, tensor in enumerate(new.values()):
        tensor[: 5 * at] = 1
    expected = dict(changes_since(old, new))
    folder = tmp_path / "deep" / "step-2"
    manifest = write_changes(folder, changes_since(old, new), base_version="1", file_bytes=400)
    assert manifest == folder / "sparse.json"
    assert json.loads(manifest.read_text())["base_version"] == "1"
    parts = list(read_folder(folder))
    assert len(parts) > 1
    for part in parts:
        assert part.keys() == {
            name.rpartition(".")[0] + end for name in part for end in (".indices", ".values")
        }
        assert len(part) == 2 or sum(tensor.nbytes for tensor in part.values()) <= 400
    read = {name: tensor for part in parts for name, tensor in part.items()}
    assert read.keys() == expected.keys()
    assert all(are_same(read[name], tensor) for name, tensor in expected.items())


def test_other_users_may_read_what_the_manifest_names(tmp_path: Path) -> None:
    changes = changes_since({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    write_changes(tmp_path, changes, base_version="1")
    (tmp_path / "other").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_manifest_names_the_bases_weights(tmp_path: Path) -> None:
    manifest = write_changes(tmp_path, [], base_version="1", base_digests=["a" * 16, "b" * 16])
    assert json.loads(manifest.read_text())["base_digests"] == ["a" * 16, "b" * 16]


def test_folder_of_an_unchanged_version_has_no_file(tmp_path: Path) -> None:
    write_changes(tmp_path, [], base_version="1")
    assert not list(read_folder(tmp_path))


def test_failed_write_leaves_no_manifest(tmp_path: Path) -> None:
    """The same folder can be written again, with fewer files."""
    old, new = ({f"w{at}": torch.full((1,), value) for at in range(3)} for value in (0.0, 1.0))
    whole = list(changes_since(old, new))

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from whole
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_changes(tmp_path, failing(), base_version="1", file_bytes=1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    write_changes(tmp_path, whole, base_version="1")
    assert len(list(read_folder(tmp_path))) == 1


def test_written_folder_is_not_written_again(tmp_path: Path) -> None:
    write_changes(tmp_path, [], base_version="1")
    with pytest.raises(FileExistsError, match="its own folder"):
        write_changes(tmp_path, [], base_version="2")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["w.indices"], "'w.indices' comes without"),
        (["w.values", "w.indices"], "'w.values' and 'w.indices' are not the halves"),
        (["w.indices", "v.values"], "'w.indices' and 'v.values' are not the halves"),
    ],
)
def test_half_a_change_is_not_written(names: list[str], words: str, tmp_path: Path) -> None:
    halves = [(name, torch.zeros(1, dtype=torch.int32)) for name in names]
    with pytest.raises(ValueError, match=words):
        write_changes(tmp_path, halves, base_version="1")
    assert not list(tmp_path.iterdir())
