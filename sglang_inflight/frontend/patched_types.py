"""Types of SGLang's objects with our attributes. Only type checkers import this module."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.tokenizer_manager import SignalHandler

from sglang_inflight.frontend.control_calls import ControlCalls
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.sglang_types import TokenizerManager


class PatchedTokenizerManager(TokenizerManager):
    # None if the server runs with us; otherwise there is no ``inflight``
    why_inactive: str | None
    inflight: Frontend


class PatchedSignalHandler(SignalHandler):
    tokenizer_manager: PatchedTokenizerManager


class PatchedEngine(Engine):
    # None on every node but the first
    tokenizer_manager: PatchedTokenizerManager | None


class PatchedCommunicator(FanOutCommunicator[Any]):
    inflight: ControlCalls


class PatchedOpenAIServing(OpenAIServingBase):
    tokenizer_manager: PatchedTokenizerManager
