"""Extensions: features in folders of their own, which the core does not know.

Each folder ``sglang_inflight/extensions/NAME/`` has one ``EXTENSION`` in its ``__init__.py``. The
core finds the folder by its place, so a server without the folder is a server without the feature.
A package of its own brings one as an entry point of the group ``sglang_inflight.extensions``.
``tests/unit/test_extensions.py`` enforces that no module outside of ``extensions`` imports one of
its folders, and that an extension imports another one only if ``requires`` names it.

An extension takes part by its ``modules``: they declare hooks on SGLang (``hooking.py``) and
functions at the core's joints (``joints.py``). A server whose setting switches an extension off
imports none of them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "sglang_inflight.extensions"


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One feature. ``__init__.py`` makes it, and imports neither SGLang nor torch."""

    name: str
    # modules that declare hooks and joins, imported before SGLang makes a process' objects
    modules: tuple[str, ...] = ()
    # modules whose hooks wait for the import of a module of SGLang's, by the latter's name
    late_modules: Mapping[str, str] = field(default_factory=dict)
    # further messages between processes than calls and their answers
    messages: Callable[[], tuple[type[Any], ...]] = tuple
    # library without which SGLang cannot import the modules that ``late_modules`` wait for
    library: str | None = None
    # dataclass of settings, see ``settings.py``
    settings: type[Any] | None = None
    # SGLang's arguments whose values beside ``unsupported.ALONE`` need this extension
    serves: tuple[str, ...] = ()
    # fields of a request's ``custom_params`` that nobody else heeds
    takes: tuple[str, ...] = ()
    # fields of ``meta_info`` that it fills in, each with one value for a request
    answers: tuple[str, ...] = ()
    # rows of ``Capabilities`` that a server without this extension refuses
    offers: tuple[str, ...] = ()
    # commands of ``sglang-inflight``: "module:function" by the command's name. They may run without
    # a server, so the setting does not matter
    commands: Mapping[str, str] = field(default_factory=dict)
    # names of the extensions that this one imports
    requires: tuple[str, ...] = ()
    # reads settings
    is_on: Callable[[], bool] = lambda: True


@functools.cache
def all_extensions() -> tuple[Extension, ...]:
    """Return the extensions that are there. Raises ``ValueError`` if one lacks another."""
    folder = Path(__file__).parent / "extensions"
    found: tuple[Extension, ...] = (
        *(
            importlib.import_module(f"{__package__}.extensions.{each.name}").EXTENSION
            for each in pkgutil.iter_modules([str(folder)])
            if each.ispkg
        ),
        *(each.load() for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)),
    )
    names = {extension.name for extension in found}
    if len(names) < len(found):
        raise ValueError(f"two extensions have one name: {[each.name for each in found]}")
    for extension in found:
        if lacking := set(extension.requires) - names:
            raise ValueError(
                f"the extension {extension.name} requires {', '.join(sorted(lacking))}, "
                "which is not installed"
            )
    return found
