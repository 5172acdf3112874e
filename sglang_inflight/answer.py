"""What the answers to callers have in common. Imports no SGLang, as a trainer reads them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Its fields are attributes, and keys as well, because as JSON it is an object.

    It is not a ``dict``: ``as_json`` makes one, down to the last of its parts.
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


# not a base class: its metaclass is another one
Mapping.register(Answer)
