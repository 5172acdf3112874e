"""SGLang's objects with ours on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.frontend.upstream.communicator import FanOutCommunicator
from sglang_inflight.frontend.upstream.engine import Engine
from sglang_inflight.frontend.upstream.openai_serving import OpenAIServing
from sglang_inflight.frontend.upstream.tokenizer_manager import SignalHandler, TokenizerManager

if TYPE_CHECKING:
    from sglang_inflight.frontend.control_calls import ControlCalls
    from sglang_inflight.frontend.frontend import Frontend


class AdoptedTokenizerManager(TokenizerManager, Protocol):
    # None in a server that runs with us; in any other there is no ``inflight``
    why_inactive: str | None
    inflight: Frontend


class AdoptedSignalHandler(SignalHandler, Protocol):
    tokenizer_manager: AdoptedTokenizerManager


class AdoptedEngine(Engine, Protocol):
    @property
    def tokenizer_manager(self) -> AdoptedTokenizerManager | None: ...


class AdoptedCommunicator(FanOutCommunicator, Protocol):
    inflight: ControlCalls


class AdoptedOpenAIServing(OpenAIServing, Protocol):
    tokenizer_manager: AdoptedTokenizerManager
