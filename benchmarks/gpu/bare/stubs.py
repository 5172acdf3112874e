"""Packages that stand in for others which SGLang imports and which no server of the kit calls."""

from __future__ import annotations

from collections.abc import Sequence

_TEXT = '''"""A stand-in for {package}: any name can be imported, and none can be called."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{{__name__}}.{{name}} is not in the pack")

    return missing
'''


def stub_files(package: str, submodules: Sequence[str] = ()) -> dict[str, str]:
    """Return the files of a stand-in for ``package``, by their path below the import path.

    ``submodules`` are full names, such as ``package.part``. A submodule of a submodule needs an
    entry for each of the two.
    """
    for name in submodules:
        if not name.startswith(f"{package}."):
            raise ValueError(f"{name} is no submodule of {package}")
    text = _TEXT.format(package=package)
    return {f"{name.replace('.', '/')}/__init__.py": text for name in (package, *submodules)}
