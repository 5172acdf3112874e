"""Checks that an adapter is served whole: each of its tensors is finite and reaches its module.

SGLang finds a tensor's place by a part of its name, and drops or misplaces other tensors: those of
heads, norms and towers, or of a module that has no adapter in this server. A NaN in an adapter ends
the scheduler when its token is sampled.

``take`` and ``read_weights`` are hooks of SGLang's ``LoRAAdapter``, on the scheduler's thread while
SGLang loads. SGLang answers a ``ValueError`` with its text. ``check`` reads all elements, so it has
a thread of its own (``adapters.py``). No request knows the adapter before its answer, so nobody
else touches the tensors meanwhile. It reads the manager, which changes only its tables of adapters.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name

from sglang_inflight.extensions.adapters.config import LARGEST, excludes, files_in, layers_of
from sglang_inflight.hooking import AROUND, LORA, hook
from sglang_inflight.sglang_types import get_model, get_parallel
from sglang_inflight.tensor_digest import digest_of_all, digests
from sglang_inflight.vocabulary.errors import Refused, list_names, shorten

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    from sglang_inflight.extensions.adapters.config import PatchedLoRAAdapter

Tensors = dict[str, torch.Tensor]

# the end of a tensor's name: A or B, perhaps with PEFT's name of the adapter
_PART = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.(?!bias$|weight$)\w+)?(?:\.weight)?$")
# the first of the modules that SGLang merges
_MERGED = re.compile(r"\.(?:q_proj|gate_proj)\.")
# PEFT saves the base's own weights beside an adapter of embeddings
_BASES_OWN = re.compile(r"(?:^|\.)(embed_tokens|lm_head)\.base_layer\.weight$")
_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\.")
# before the layers of a language model, in names of PEFT, of transformers and of SGLang
_LANGUAGE_MODEL = frozenset(
    {
        "backbone",
        "base_model",
        "decoder",
        "language_model",
        "llm",
        "model",
        "text_model",
        "thinker",
        "transformer",
    }
)


# ---- while SGLang loads --------------------------------------------------------------


@hook(f"{LORA}.initialize_weights", AROUND)
def read_weights(read: Callable[..., None], adapter: PatchedLoRAAdapter) -> None:
    """Read the adapter's files into memory of its own. Raise ``ValueError`` if they change.

    SGLang maps the files. A trainer that writes the next adapter over them would change the
    weights of this one, and a file cut short would end the process.
    """
    model: Any = get_model()
    with model.override(weight_loader_disable_mmap=True):
        read(adapter)
    if files_in(adapter.config.path) != adapter.config.inflight_files:
        raise ValueError(f"the files in {adapter.config.path!r} changed while they were read")


@hook(f"{LORA}._process_weight", AROUND)
def take(
    process: Callable[..., None],
    adapter: PatchedLoRAAdapter,
    name: str,
    loaded_weight: torch.Tensor,
) -> None:
    """Let SGLang keep a tensor. Raise ``ValueError`` with its name if SGLang would drop it."""
    named = shorten(repr(name))
    is_bases_own = _BASES_OWN.search(name) is not None
    if _PART.search(name) is None and not is_bases_own:
        raise ValueError(f"tensor {named} is neither lora_A nor lora_B of a module")
    if not isinstance(loaded_weight, torch.Tensor) or not loaded_weight.is_floating_point():
        raise ValueError(f"{named} is no tensor of floating-point numbers")
    # SGLang's own name for it
    kept = name.replace("unembed_tokens", "lm_head")
    layer = get_layer_id(kept)
    if layer is not None and layer >= len(adapter.layers):
        raise ValueError(f"tensor {named}: the model has {len(adapter.layers)} layers")
    place = adapter.embedding_layers if layer is None else adapter.layers[layer].weights
    if kept in place:
        raise ValueError(f"tensor {named} comes twice")
    process(adapter, name, loaded_weight)
    if kept not in place:
        raise ValueError(
            f"tensor {named} reaches no weight: it is of no layer, and of no embedding in the "
            "adapter's target_modules"
        )
    vars(adapter).setdefault("inflight_received", []).append(kept)


@hook(f"{LORA}.normalize_qkv_proj", AROUND)
@hook(f"{LORA}.normalize_gate_up_proj", AROUND)
def merge(
    merge: Callable[..., None],
    adapter: PatchedLoRAAdapter,
    weight_names: list[str],
    weights: Tensors,
) -> None:
    """Merge a layer's tensors as SGLang does. Raise ``ValueError`` with the name of one that fails.

    SGLang merges them in order, and puts the merged tensor in the place of the first.
    """
    try:
        merge(adapter, weight_names, weights)
    except KeyError as missing:
        raise ValueError(f"tensor {missing} is missing: SGLang merges it with others") from missing
    except RuntimeError as error:
        firsts = (name for name in weight_names if name in weights and _MERGED.search(name))
        named = shorten(repr(next(firsts, "")))
        raise ValueError(f"tensor {named} cannot be merged with others: {error}") from error


# ---- after the load ------------------------------------------------------------------


def check(manager: LoRAManager, adapter: LoRAAdapter) -> None:
    """Raise ``Refused`` with a tensor's name unless ``adapter`` is served whole."""
    slots = _Slots(manager, adapter)
    _try_buffers(manager, adapter, slots)
    for slot in slots:
        slots.refuse_not_finite(slot)


def digest_of(adapter: LoRAAdapter) -> str:
    """Return the digest of the adapter's configuration and tensors, 16 hex digits."""
    config = json.dumps(adapter.config.hf_config, sort_keys=True, default=str)
    of_config = hashlib.sha256(config.encode()).hexdigest()[:16]
    return digest_of_all([of_config, *digests(_tensors_of(adapter)).values()])


def _tensors_of(adapter: LoRAAdapter) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in adapter.layers:
        yield from layer.weights.items()
    yield from adapter.embedding_layers.items()


class _Slot(NamedTuple):
    """A module's part in the adapter: A and B, by their names after SGLang has merged tensors."""

    names: dict[str, str]
    tensors: Tensors


class _Slots:
    """The modules that an adapter's tensors reach.

    SGLang's model names a module as the checkpoint does, but for merged ones, and a level that
    some models leave out or add. SGLang has merged the adapter's tensors alike. Checked here are
    the place in a layer, and that the layer is of the language model. A tower's layers have the
    same numbers.
    """

    def __init__(self, manager: LoRAManager, adapter: LoRAAdapter) -> None:
        self._manager = manager
        self._adapter = adapter
        self._config = adapter.config.hf_config
        self._received: list[str] = vars(adapter).get("inflight_received", [])
        self._targets = manager.memory_pool.target_modules
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._takes: dict[int, dict[str, Any]] = {}
        modules = manager.base_model.named_modules()
        self._present = {get_layer_id(name) for name, _ in modules}
        self._before_layers = _LANGUAGE_MODEL | {
            part
            for modules in manager.lora_modules
            for name in modules
            for part in _before_layer(name).split(".")
        }
        self._fill()

    def __iter__(self) -> Iterator[_Slot]:
        return iter(self._slots.values())

    def sent(self, name: str) -> str:
        """Return the received tensor's name for ``name``, or the names of those merged to it."""
        if name in self._received:
            return shorten(repr(name))
        part = _PART.search(name)
        assert part is not None, name
        parent, end = name[: part.start()].rpartition(".")[0], name[part.start() :]
        merged = [
            each
            for each in self._received
            if each.endswith(end) and each.removesuffix(end).rpartition(".")[0] == parent
        ]
        return list_names([shorten(repr(each)) for each in merged])

    def _fill(self) -> None:
        of_modules = [name for name in self._received if not _BASES_OWN.search(name)]
        if not of_modules:
            raise Refused("the adapter has no tensor")
        for name in of_modules:
            self._refuse_excluded(name)
        self._normalized = get_normalized_target_modules(self._adapter.config.target_modules)
        layers = layers_of(self._config)
        for number, layer in enumerate(self._adapter.layers):
            if layer.weights and layers is not None and number not in layers:
                raise Refused(
                    f"tensor {self.sent(next(iter(layer.weights)))}: layers_to_transform leaves "
                    f"out layer {number}"
                )
            for name, tensor in layer.weights.items():
                if number in self._present or get_parallel().pp_size == 1:
                    self._add(number, name, tensor)
        for name, tensor in self._adapter.embedding_layers.items():
            if not _BASES_OWN.search(name):
                self._add_embedding(name, tensor)
        for slot in self:
            for part, other in ("AB", "BA"):
                if part not in slot.names:
                    raise Refused(f"tensor {self.sent(slot.names[other])} has no lora_{part}")

    def _refuse_excluded(self, name: str) -> None:
        path = _path_of(name)[0].removeprefix("base_model.model.")
        try:
            is_excluded = excludes(self._config, path)
        except re.error as error:
            raise Refused(f"exclude_modules is no regular expression: {error}") from error
        if is_excluded:
            raise Refused(f"tensor {shorten(repr(name))}: exclude_modules names its module")

    def _add(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        path, part = _path_of(name)
        if not self._is_of_language_model(_before_layer(path)):
            raise Refused(
                f"tensor {self.sent(name)} reaches no weight: it is not of the language model"
            )
        module = _in_layer(path)
        own, expert = self._find(layer, name, module)
        try:
            target = get_target_module_name(name, self._targets)
        except ValueError as error:
            raise Refused(f"tensor {self.sent(name)} reaches no weight: {error}") from error
        if "all" not in self._normalized and target not in self._normalized:
            raise Refused(f"tensor {self.sent(name)}: target_modules does not name its module")
        sharing = [each for each, of in self._modules_in(layer).items() if of == target]
        if not expert and len(sharing) > 1:
            raise Refused(
                f"tensor {self.sent(name)}: SGLang has one adapter for {list_names(sharing)}"
            )
        self._put((layer, f"{own}.{expert}"), part, name, tensor)

    def _find(self, layer: int, name: str, module: str) -> tuple[str, str]:
        """Return the model's own module that ``module`` means, both paths in the layer.

        For experts also return the rest of the path: the expert's number, if any, and its part.
        """
        taken, parts = self._modules_in(layer), module.split(".")
        for own, target in taken.items():
            end = own.rpartition(".")[2]
            if end not in parts or (target is not None and parts[-1] != end):
                continue
            # in a path of experts, this part names all experts
            count = len(parts) if target is not None else parts.index(end) + 1
            if _has_in_order(parts[:count], own) or _has_in_order(own.split("."), module):
                expert = parts[count:]
                self._refuse_absent_expert(name, expert)
                return own, ".".join(expert)
        both = ", and experts need gate_up_proj and down_proj" if "experts" in module else ""
        raise Refused(
            f"tensor {self.sent(name)} reaches no weight: nothing named {module!r} has "
            f"adapters in layer {layer}. --lora-target-modules has "
            f"{list_names(sorted(self._targets))}{both}"
        )

    def _refuse_absent_expert(self, name: str, expert: list[str]) -> None:
        count = self._manager.memory_pool._get_num_experts(self._manager.base_model)
        if expert and expert[0].isdigit() and int(expert[0]) >= count:
            raise Refused(f"tensor {self.sent(name)}: the layer has {count} experts")

    def _modules_in(self, layer: int) -> dict[str, str | None]:
        """Return the targets of the layer's modules that take adapters; None of experts."""
        if layer not in self._takes:
            self._takes[layer] = {
                _in_layer(name): None
                if hasattr(module, "slice_moe_lora_a_weights")
                else get_target_module_name(name, self._targets)
                for name, module in self._manager.lora_modules[layer].items()
            }
        return self._takes[layer]

    def _add_embedding(self, name: str, tensor: torch.Tensor) -> None:
        path, part = _path_of(name)
        before, _, module = path.rpartition(".")
        there = {
            "embed_tokens": self._manager.embed_tokens_module,
            "lm_head": self._manager.lm_head_module,
        }
        if module not in there or not self._is_of_language_model(before):
            raise Refused(f"tensor {shorten(repr(name))} reaches no weight of the language model")
        if there[module] is not None:
            self._put((-1, module), part, name, tensor)
        elif get_parallel().pp_size == 1:
            raise Refused(
                f"tensor {shorten(repr(name))} reaches no weight: --lora-target-modules does not "
                f"name {module}"
            )

    def _is_of_language_model(self, path: str) -> bool:
        return all(part in self._before_layers for part in path.split(".") if part)

    def _put(self, key: tuple[int, str], part: str, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() not in (2, 3):
            raise Refused(f"tensor {self.sent(name)} is of shape {list(tensor.shape)}")
        slot = self._slots.setdefault(key, _Slot({}, {}))
        if part in slot.names:
            raise Refused(
                f"tensors {self.sent(slot.names[part])} and {self.sent(name)} reach one weight"
            )
        slot.names[part], slot.tensors[part] = name, tensor

    def refuse_not_finite(self, slot: _Slot) -> None:
        """Raise ``Refused`` for values too large, or that the buffers' dtype does not hold.

        ``lora_A`` alone counts, because it makes activations, and so does the product.
        """
        dtype, config = self._manager.dtype, self._adapter.config
        product = abs(self._adapter.scaling) * config.r
        for part, tensor in sorted(slot.tensors.items()):
            if not tensor.numel():
                continue
            # torch finds no extremes of one byte
            extremes = torch.stack(
                torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
            )
            named = f"tensor {self.sent(slot.names[part])}"
            if not extremes.isfinite().all():
                raise Refused(f"{named} holds NaN or infinity")
            if not extremes.to(dtype).isfinite().all():
                raise Refused(f"{named} holds values that {dtype} does not hold")
            largest = float(extremes.double().abs().max())
            product *= largest
            if part == "A" and largest > LARGEST:
                raise Refused(f"{named} holds values beyond {LARGEST:g}")
            if part == "B" and product > LARGEST:
                raise Refused(
                    f"{named} makes a product beyond {LARGEST:g}, with its lora_A and lora_alpha "
                    f"{config.lora_alpha:g}"
                )


def _path_of(name: str) -> tuple[str, str]:
    """Return the path of a tensor's module, and the tensor's part: A or B."""
    part = _PART.search(name)
    assert part is not None, name
    return name[: part.start()], part[1]


def _has_in_order(parts: list[str], path: str) -> bool:
    """Return whether ``path`` has all ``parts``: models leave out a level, or add one."""
    there = iter(path.split("."))
    return all(part in there for part in parts)


def _before_layer(path: str) -> str:
    found = _LAYERS.search(path)
    return path[: found.start()] if found else path


def _in_layer(path: str) -> str:
    found = _LAYERS.search(path)
    return path[found.end() :] if found else path


# ---- SGLang's own copy ---------------------------------------------------------------


def _try_buffers(manager: LoRAManager, adapter: LoRAAdapter, slots: _Slots) -> None:
    """Run SGLang's copy to the buffers on meta tensors: shapes without contents.

    SGLang copies when a request runs, and a wrong shape would then end the scheduler.
    """
    pool = _shape_of_pool(manager.memory_pool)
    copied: dict[str, None] = {}

    def note(_: object, key: str, weight: torch.Tensor) -> torch.Tensor:
        copied[key.partition("#")[0]] = None
        return weight

    # SGLang calls it for each tensor, right before the copy
    vars(pool)["_get_maybe_cached_weight_for_transfer"] = note
    try:
        pool.load_lora_weight_to_buffer(
            adapter.uid,
            0,
            _shape_of_adapter(adapter),
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
    except Exception as error:
        is_of_last = isinstance(error, AssertionError) and copied
        named = f"tensor {slots.sent([*copied][-1])}: " if is_of_last else ""
        why = shorten(str(error)) or type(error).__name__
        raise Refused(f"its weights do not fit the model: {named}{why}") from error
    # other ranks copy the other experts
    if not pool.moe_use_local_expert_ids:
        for name in (name for slot in slots for name in slot.names.values()):
            if name not in copied:
                raise Refused(f"tensor {slots.sent(name)} reaches no weight")


def _shape_of_adapter(adapter: LoRAAdapter) -> Any:
    return SimpleNamespace(
        config=adapter.config,
        scaling=adapter.scaling,
        layers=[
            SimpleNamespace(weights=_shapes_of(layer.weights), pinned_weights={})
            for layer in adapter.layers
        ],
        embedding_layers=_shapes_of(adapter.embedding_layers),
        pinned_embedding_layers={},
        added_tokens_embeddings=_shapes_of(adapter.added_tokens_embeddings),
        pinned_added_tokens_embeddings={},
    )


def _shape_of_pool(pool: LoRAMemoryPool) -> LoRAMemoryPool:
    """Return a copy of ``pool`` with meta buffers of one slot."""
    trial = copy.copy(pool)
    for name in ("A_buffer", "B_buffer"):
        of_layers: dict[str, list[torch.Tensor]] = getattr(pool, name)
        setattr(trial, name, {key: [_one_slot(b) for b in of] for key, of in of_layers.items()})
    for name in (
        "embedding_A_buffer",
        "embedding_B_buffer",
        "lm_head_A_buffer",
        "lm_head_B_buffer",
        "new_embeddings_buffer",
    ):
        buffers: Tensors = getattr(pool, name)
        setattr(trial, name, {key: _one_slot(buffer) for key, buffer in buffers.items()})
    return trial


def _shapes_of(tensors: Tensors) -> Tensors:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def _one_slot(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty((1, *buffer.shape[1:]), dtype=buffer.dtype, device="meta")
