"""Plugin for mypy: SGLang's ``A`` is ``typing.Annotated``, an alias that mypy does not follow."""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import AnalyzeTypeContext, Plugin
from mypy.types import Type

_ALIAS = "sglang.srt.arg_groups.arg_utils.A"


class AnnotatedPlugin(Plugin):
    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        return _first_argument if fullname == _ALIAS else None


def _first_argument(context: AnalyzeTypeContext) -> Type:
    return context.api.analyze_type(context.type.args[0])


def plugin(version: str) -> type[Plugin]:
    return AnnotatedPlugin
