"""Types of SGLang's objects with our attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.frontend.sglang_types.tokenizer_manager import (
    Engine,
    FanOutCommunicator,
    OpenAIServing,
    SignalHandler,
    TokenizerManager,
)

if TYPE_CHECKING:
    from sglang_inflight.frontend.control_calls import ControlCalls
    from sglang_inflight.frontend.frontend import Frontend


class PatchedTokenizerManager(TokenizerManager, Protocol):
    # None if the server runs with us; otherwise there is no ``inflight``
    why_inactive: str | None
    inflight: Frontend


class PatchedSignalHandler(SignalHandler, Protocol):
    tokenizer_manager: PatchedTokenizerManager


class PatchedEngine(Engine, Protocol):
    @property
    def tokenizer_manager(self) -> PatchedTokenizerManager | None: ...


class PatchedCommunicator(FanOutCommunicator, Protocol):
    inflight: ControlCalls


class PatchedOpenAIServing(OpenAIServing, Protocol):
    tokenizer_manager: PatchedTokenizerManager
