"""The series in ``patches/``, applied to the installed SGLang in memory.

One patch changes function bodies and nothing else. That is what makes it safe to apply
to a living module: the functions that changed are compiled alone, in their module's own
namespace, and put in place through SGLang's ``HookRegistry``; every other object of the
module, its state and its identity stay as they were imported. Site-packages is never
written.

A server never starts half patched. SGLang logs and swallows an ``Exception`` of a
plugin, so every doubt ends in ``PatchRefused``, a ``SystemExit``: before registering
(version, context, reach of a patch, a rival REPLACE) and again after SGLang applied all
plugins' hooks, when a rival that came later would show.

One kind of function must not be patched: one whose decorator files it somewhere at
import, such as a route. What was filed would stay the old function.

``series`` reads and places the patches, ``exact`` applies a diff, ``functions`` finds
what changed, ``compiling`` makes the functions, ``hooks`` installs and verifies them.
"""

from sglang_inflight.livepatch.errors import PatchRefused
from sglang_inflight.livepatch.hooks import expect_hook, is_fork, verify_hooks
from sglang_inflight.livepatch.series import (
    AppliedFunction,
    Patch,
    Plan,
    Series,
    apply_series,
    installed_root,
    load_series,
    read_series,
    supported_versions,
)

__all__ = [
    "AppliedFunction",
    "Patch",
    "PatchRefused",
    "Plan",
    "Series",
    "apply_series",
    "expect_hook",
    "installed_root",
    "is_fork",
    "load_series",
    "read_series",
    "supported_versions",
    "verify_hooks",
]
