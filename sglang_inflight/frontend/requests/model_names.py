"""Resolve a request's model name to the served model or an adapter.

SGLang's OpenAI routes serve any name by the base model, even a loaded adapter's name: the client
silently gets tokens of the base model. Here the name is looked up; an unknown name is a 404.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.vocabulary.errors import NotFound, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# SGLang's name for a body without a model
DEFAULT = "default"


class ModelNames:
    """Look names up, from any thread. Only the names at the start are kept.

    SGLang converts requests on other threads while the event loop loads and unloads adapters. A
    single dict lookup is atomic. If the adapter is unloaded right after the lookup, SGLang refuses
    the request at its own lookup, under its lock.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, *, known_only: bool) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._known_only = known_only
        self._at_start = (tokenizer_manager.served_model_name, tokenizer_manager.model_path)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter named by ``model``, or None for the served model.

        An adapter goes before a model of the same name: trainers for vLLM load their adapter
        under the model's name. Raises ``NotFound`` for an unknown name, unless the server takes
        any name. Raises ``Refused`` for an adapter called "default", an ambiguous name.
        """
        if not model:
            return None
        if self._is_adapter(model):
            if model == DEFAULT:
                raise Refused(
                    f"the model {model!r} is ambiguous: it is an adapter, and the default of a "
                    f"body without a model. Use {self._model_name!r} for the model, or "
                    f"'{self._model_name}:{DEFAULT}' for the adapter"
                )
            return model
        names = self._names()
        if model in names:
            return None
        for name in names:
            # SGLang's form for an adapter of a model
            if model.startswith(f"{name}:"):
                adapter = model[len(name) + 1 :].strip()
                if not adapter:
                    return None
                if self._is_adapter(adapter):
                    return adapter
                raise NotFound(
                    f"the model {model!r} does not exist: no adapter {adapter!r} is loaded"
                )
        if not self._known_only:
            _, colon, adapter = model.partition(":")
            if not colon:
                return None
            if self._is_adapter(adapter.strip()):
                return adapter.strip()
        raise NotFound(
            f"the model {model!r} does not exist: no adapter of the name is loaded, and the served "
            f"model is called {self._model_name!r}, {self._tokenizer_manager.model_path!r} "
            f"or {DEFAULT!r}. SGLANG_INFLIGHT_MODEL_NAMES=any accepts any name for it"
        )

    @property
    def _model_name(self) -> str:
        return self._tokenizer_manager.served_model_name

    def _names(self) -> list[str]:
        """Return names of the served model, longest first: a name may be another plus a colon."""
        now = (self._model_name, self._tokenizer_manager.model_path)
        return sorted({*self._at_start, *now, DEFAULT, ""}, key=len, reverse=True)

    def _is_adapter(self, name: str) -> bool:
        """Whether the adapter is loaded, or SGLang would load it again for a request."""
        tokenizer_manager = self._tokenizer_manager
        return (
            name in tokenizer_manager.lora_registry._registry
            or name in tokenizer_manager.lora_ref_cache
        )
