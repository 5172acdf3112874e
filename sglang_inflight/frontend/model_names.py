"""Which weights a request means by the name of a model.

SGLang's OpenAI routes serve any name by the model itself, an adapter's own name too: who asks for
a policy that is an adapter gets tokens of the base model, and no sign of it. So a name is looked
up here. It is an adapter's, the model's, or nobody's, which is a 404.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.errors import NotFound, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

# which SGLang reads where a body names no model
DEFAULT = "default"


class ModelNames:
    """Keeps nothing but the names of the start, and may be asked from any thread.

    SGLang converts requests on threads of their own while the event loop loads and unloads
    adapters. One look into a dict is atomic there, and a name that is unloaded right after it is
    refused by SGLang, which looks it up once more, under its lock.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, *, known_only: bool) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._known_only = known_only
        self._at_start = (tokenizer_manager.served_model_name, tokenizer_manager.model_path)

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that ``model`` names, or None for the model that is served.

        An adapter goes before a model of the same name, as with vLLM, whose trainers load their
        adapter under the name of the model. Raises ``NotFound`` for an unknown name, unless the
        server takes any, and ``Refused`` for one that could mean either.
        """
        if not model:
            return None
        if self._is_adapter(model):
            if model == DEFAULT:
                raise Refused(
                    f"the model {model!r} is an adapter, and what a body says that names no "
                    f"model: say {self._served!r} for the model, or "
                    f"'{self._served}:{DEFAULT}' for the adapter"
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
            f"the model {model!r} does not exist: no adapter of the name is loaded, and the model "
            f"that is served is called {self._served!r}, {self._tokenizer_manager.model_path!r} "
            f"or {DEFAULT!r}. SGLANG_INFLIGHT_MODEL_NAMES=any serves it by any name"
        )

    @property
    def _served(self) -> str:
        return self._tokenizer_manager.served_model_name

    def _names(self) -> list[str]:
        """Names of the served model, the longest first: one may begin with another and a colon."""
        now = (self._served, self._tokenizer_manager.model_path)
        return sorted({*self._at_start, *now, DEFAULT, ""}, key=len, reverse=True)

    def _is_adapter(self, name: str) -> bool:
        """Whether a request finds it, loaded or by loading it again."""
        tokenizer_manager = self._tokenizer_manager
        return (
            name in tokenizer_manager.lora_registry._registry
            or name in tokenizer_manager.lora_ref_cache
        )
