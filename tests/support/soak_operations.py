"""Further operations of a soak: adapters, sparse folders, changes of one element, and saves.

One caller makes one call after another, so each operation knows what the server serves.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from harness import marker
from harness.server import Server
from harness.trainer import Trainers
from tests.support import lora
from tests.support.load import status, until
from tests.support.sparse import BAD, SparseSender, changes, changes_between
from tests.support.updates import LIVE, Call, Weights, tensor_body

SAVE, DISCARD = "/inflight/save", "/inflight/discard"
FROM_DISK = "/update_weights_from_disk"
LOADS = {"files": "/load_lora_adapter", "tensors": "/load_lora_adapter_from_tensors"}
ADAPTERS = ("first", "second")
LORA_FLAGS = (
    "--enable-lora",
    "--lora-backend", "torch_native",
    "--max-lora-rank", str(lora.RANK),
    "--lora-target-modules", "o_proj",
    "--max-loras-per-batch", "4",
)  # fmt: skip
# row of the head of a token that no version makes
_UNUSED_ROW = 700

Operations = dict[Callable[[], None], int]


def one_element_more(weights: Weights, choose: random.Random) -> Weights:
    """Return ``weights`` with one element of each tensor changed. The tokens stay the same."""
    changed = {}
    for name, tensor in weights.items():
        changed[name] = tensor.clone()
        first = _UNUSED_ROW * marker.HIDDEN if name == "lm_head.weight" else 0
        changed[name].view(-1)[choose.randrange(first, tensor.numel())] += 2**-7
    return changed


def any_kv_policy(choose: random.Random) -> dict[str, Any]:
    """Return an update's fields for some policy for the KV of older weights."""
    names = ("fence", "keep", "recompute", "by_salt")
    if choose.random() < 0.5:
        return {"kv_cache": choose.choice(names)}
    return {"kv_max_age": choose.randrange(4)}


class Changes:
    """Updates that change little, each checked by its digest."""

    def __init__(
        self,
        server: Server,
        choose: random.Random,
        model: marker.Model,
        versions: int,
        trainers: Trainers,
        folder: Path,
        updates: Counter[str],
    ) -> None:
        self._server = server
        self._choose = choose
        self._model = model
        self._versions = versions
        self._sparse = SparseSender(trainers, folder / "sparse")
        self._updates = updates
        self._serial = itertools.count()

    def operations(self) -> Operations:
        return {self.change_one_element_of_each_tensor: 2, self.send_changes: 4, self.refuse: 2}

    def change_one_element_of_each_tensor(self) -> None:
        """Each element counts: the digest is another one, and comes back."""
        version = self._choose.randrange(self._versions)
        plain = self._model.tensors(version)
        changed = one_element_more(plain, self._choose)
        name = f"v{version}"
        before = self._send_whole(plain, name)
        after = self._send_whole(changed, f"{name}+e{next(self._serial)}")
        assert before != after
        assert self._send_whole(plain, name) == before
        there, back = changes(plain, changed), changes(changed, plain)
        assert len(there) == len(back) == 2 * len(plain)
        assert self._send_sparse(there, f"{name}+e{next(self._serial)}") == after
        assert self._send_sparse(back, name) == before
        self._updates["one element of each tensor"] += 1

    def send_changes(self) -> None:
        """Go from one version to another by the elements in which they differ."""
        base, version = self._choose.sample(range(self._versions), 2)
        # what is served may be a version with other elements, by a rollback
        self._send_whole(self._model.tensors(base), f"v{base}")
        digest = self._send_sparse(changes_between(base, version, self._model), f"v{version}")
        assert self._send_whole(self._model.tensors(version), f"v{version}") == digest
        self._updates["sparse"] += 1

    def refuse(self) -> None:
        weights, words = self._choose.choice([*BAD.values()])
        digest, base = self._digest, self._served
        source = self._choose.choice(("tensor", "disk"))
        answer = self._sparse.send(
            self._server, source, weights, base_version=base, partial=True, **LIVE
        )
        assert answer["status_code"] == 400, (answer, words)
        answer = self._sparse.send(
            self._server, source, changes_between(0, 1, self._model), base_version="none", **LIVE
        )
        assert answer["status_code"] == 409, answer
        assert (self._digest, self._served) == (digest, base)

    def _send_whole(self, weights: Weights, name: str) -> str:
        body = tensor_body(weights, weight_version=name, **self._kv())
        return _digest_of(self._server.post("/update_weights_from_tensor", body))

    def _send_sparse(self, weights: Weights, name: str) -> str:
        source = self._choose.choice(("tensor", "disk"))
        answer = self._sparse.send(
            self._server,
            source,
            weights,
            base_version=self._served,
            partial=True,
            weight_version=name,
            **self._kv(),
        )
        return _digest_of(answer)

    def _kv(self) -> dict[str, Any]:
        return {"non_blocking": True, **any_kv_policy(self._choose)}

    @property
    def _served(self) -> str:
        served: str = status(self._server)["weight_version"]
        return served

    @property
    def _digest(self) -> str | None:
        digest: str | None = status(self._server)["digest"]
        return digest


class Saves:
    """Saves of what is served, and what callers and kills leave of them."""

    def __init__(
        self, server: Server, choose: random.Random, checkpoints: Path, folder: Path
    ) -> None:
        self._server = server
        self._choose = choose
        self._checkpoints = checkpoints
        self._folders = (folder / f"saved{serial}" for serial in itertools.count())
        self.counts: Counter[str] = Counter()

    def operations(self) -> Operations:
        return {self.save_and_load: 2, self.save_beside_an_update: 2, self.leave_a_save: 1,
                self.discard_the_leftover: 2, self.refuse_a_discard: 1}  # fmt: skip

    def save_and_load(self) -> None:
        folder = next(self._folders)
        saved = self._save(folder)
        if saved is not None:
            body = {"model_path": str(folder), "load_format": "served", **LIVE}
            digest = _digest_of(self._server.post(FROM_DISK, body))
            assert digest == saved["ranks"][0]["digest"]
            self.counts["loaded"] += 1
        self._discard(folder)

    def save_beside_an_update(self) -> None:
        folder = next(self._folders)
        save = Call(self._server, SAVE, {"path": str(folder)})
        body = {"model_path": str(self._checkpoints / "v1"), "weight_version": "v1", **LIVE}
        answer = self._server.post(FROM_DISK, body)
        assert answer["status_code"] == 200, answer
        answer = save.answer()
        assert answer["status_code"] in (200, 409), answer
        assert folder.exists() == (answer["status_code"] == 200)
        self._discard(folder)
        self.counts["beside an update"] += 1

    def leave_a_save(self) -> None:
        folder = next(self._folders)
        _leave(self._server, SAVE, {"path": str(folder)}, self._choose)
        # the call may have been read late, or not at all
        until("the save has ended", lambda: self._save(next(self._folders)) is not None)
        until(
            "its folder is whole or gone",
            lambda: not folder.exists() or (folder / "served.json").exists(),
        )
        self._discard(folder)

    def discard_the_leftover(self) -> None:
        """A killed server has left a part of its save."""
        folder = next(self._folders)
        if self._save(folder) is None:
            return
        tensors, part = folder / "rank-pp0-tp0.safetensors", folder / "rank-pp0-tp0.json"
        manifest = folder / "served.json"
        kept = self._choose.choice(((tensors,), (tensors, part), (tensors, part, manifest)))
        for file in (tensors, part, manifest):
            if file not in kept:
                file.unlink()
        os.truncate(kept[-1], self._choose.randrange(kept[-1].stat().st_size))
        answer = self._server.post(SAVE, {"path": str(folder)})
        assert answer["status_code"] == 409, answer
        self._discard(folder)
        self.counts["leftover"] += 1

    def refuse_a_discard(self) -> None:
        folder = next(self._folders)
        folder.mkdir()
        name = self._choose.choice(("rank-pp0-tp0.json", "rank-pp0-tp0.safetensors"))
        make = self._choose.choice((os.mkfifo, lambda path: os.symlink("/dev/zero", path)))
        make(folder / name)
        answer = self._server.post(DISCARD, {"path": str(folder)})
        assert answer["status_code"] == 400, answer
        assert name in answer["message"]
        assert (folder / name).is_symlink() or (folder / name).is_fifo()

    def _save(self, folder: Path) -> dict[str, Any] | None:
        """Return the answer, or None if the server may not save now."""
        answer: dict[str, Any] = self._server.post(SAVE, {"path": str(folder)})
        self.counts[f"save: {answer['status_code']}"] += 1
        if answer["status_code"] == 200:
            return answer
        assert answer["status_code"] == 409, answer
        assert not folder.exists()
        return None

    def _discard(self, folder: Path) -> None:
        answer = self._server.post(DISCARD, {"path": str(folder)})
        assert answer["status_code"] == 200, answer
        assert not folder.exists()


class Loras:
    """Adapters that come, replace each other and go, and some that must not be served."""

    def __init__(self, server: Server, choose: random.Random, folder: Path) -> None:
        self._server = server
        self._choose = choose
        self._folders = (folder / f"adapter{serial}" for serial in itertools.count())
        # names that requests may use
        self.loaded: set[str] = set()
        self.counts: Counter[str] = Counter()

    def operations(self) -> Operations:
        return {self.load: 4, self.refuse: 4, self.unload: 1, self.leave_a_load: 1}

    def load(self) -> None:
        name = self._choose.choice(ADAPTERS)
        answer = self._post(name, lora.tensors(self._choose.randrange(8)), self._how())
        # not while another replacement is under way, or the running adapters would not fit
        assert answer["status_code"] in (200, 409), answer
        if answer["status_code"] == 200:
            self.loaded.add(name)
        self.counts[f"load: {answer['status_code']}"] += 1

    def refuse(self) -> None:
        """A load that could not be served whole is refused, and leaves the name as it was."""
        name = self._choose.choice((*ADAPTERS, "bad"))
        kind = self._choose.choice([*_BAD_ADAPTERS])
        weights, config = _BAD_ADAPTERS[kind]()
        how = self._how() if name in self.loaded else {}
        answer = self._post(name, weights, how, **config)
        assert 400 <= answer["status_code"] < 500, (kind, answer)
        self.counts[f"refused: {kind}"] += 1

    def unload(self) -> None:
        if self.loaded:
            name = self._choose.choice(sorted(self.loaded))
            self.loaded.discard(name)
            body = {"lora_name": name, "non_blocking": True}
            answer = self._server.post("/unload_lora_adapter", body)
            assert answer["status_code"] == 200, answer

    def leave_a_load(self) -> None:
        """A load that was begun is completed."""
        name = self._choose.choice(ADAPTERS)
        folder = lora.write(next(self._folders), lora.tensors(0))
        body = {"lora_name": name, "lora_path": str(folder), "replace": True}
        _leave(self._server, LOADS["files"], body, self._choose)
        # whether it was read shows now
        answer = self._post(name, lora.tensors(1), {"replace": True})
        assert answer["status_code"] in (200, 409), answer
        if answer["status_code"] == 200:
            self.loaded.add(name)

    def _how(self) -> dict[str, Any]:
        running = self._choose.choice(("finish", "move"))
        kv = self._choose.choice(("recompute", "fence"))
        return {
            "replace": True,
            "running": running,
            **({"kv_cache": kv} if running == "move" else {}),
        }

    def _post(
        self, name: str, weights: Weights, how: dict[str, Any], **config: Any
    ) -> dict[str, Any]:
        way = self._choose.choice([*LOADS])
        if way == "files":
            body: dict[str, Any] = {
                "lora_path": str(lora.write(next(self._folders), weights, **config))
            }
        else:
            body = lora.tensor_body(weights, **config)
        answer: dict[str, Any] = self._server.post(LOADS[way], {"lora_name": name, **body, **how})
        return answer


def _spoilt(value: float, dtype: torch.dtype) -> Weights:
    weights = {name: tensor.to(dtype) for name, tensor in lora.tensors(1).items()}
    [*weights.values()][-1].view(-1)[3] = value
    return weights


def _renamed(old: str, new: str) -> Weights:
    return {name.replace(old, new): tensor for name, tensor in lora.tensors(1).items()}


# tensors, and fields of the configuration
_BAD_ADAPTERS: dict[str, Callable[[], tuple[Weights, dict[str, Any]]]] = {
    "NaN": lambda: (_spoilt(float("nan"), torch.bfloat16), {}),
    "infinite in the buffer": lambda: (_spoilt(3.4e38, torch.float32), {}),
    "another layer": lambda: (_renamed("layers.0.", "layers.99."), {}),
    "misspelt": lambda: (_renamed("o_proj", "o_porj"), {}),
    "a norm": lambda: (_renamed("self_attn.o_proj", "input_layernorm"), {}),
    "half of it": lambda: (dict([*lora.tensors(1).items()][:1]), {}),
    "too strong": lambda: (lora.tensors(1), {"lora_alpha": 1e38}),
    "no field of SGLang's": lambda: (lora.tensors(1), {"modules_to_save": ["lm_head"]}),
    "biases": lambda: (lora.tensors(1), {"bias": "all"}),
    "another rank": lambda: (lora.tensors(1), {"r": 2 * lora.RANK}),
}


def _leave(server: Server, path: str, body: dict[str, Any], choose: random.Random) -> None:
    """Call, and leave soon, with or without the answer."""
    try:
        server.post(path, body, timeout=choose.uniform(0.0005, 0.03))
    except httpx.TimeoutException:
        return


def _digest_of(answer: dict[str, Any]) -> str:
    assert answer["status_code"] == 200, answer
    digest: str = answer["ranks"][0]["digest"]
    return digest
