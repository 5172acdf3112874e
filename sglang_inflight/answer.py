"""Base class of answers to callers. Imports no SGLang, because trainers read answers too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with fields as attributes and as keys, like a JSON object.

    An answer is no ``dict``. ``as_json`` converts it, nested answers included.
    """

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return content

    def __getitem__(self, name: str) -> Any:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def __len__(self) -> int:
        return len(self.__struct_fields__)

    def __contains__(self, name: object) -> bool:
        return name in self.__struct_fields__

    def keys(self) -> tuple[str, ...]:
        return self.__struct_fields__

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


# registered, not inherited: Mapping and Struct have different metaclasses
Mapping.register(Answer)
