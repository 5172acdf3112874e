"""Apply the series in ``patches/`` to the installed SGLang in memory.

A patch changes only function bodies, so it is safe to apply to a loaded module. Each changed
function is compiled alone, in its module's own namespace, and installed through SGLang's
``HookRegistry``. All other objects of the module keep their state and identity. Site-packages is
never written.

A server never starts half patched. SGLang logs and swallows an ``Exception`` of a plugin, so every
doubt ends in ``PatchRefused``, a ``SystemExit``. The series is checked before registering
(version, context, reach of a patch, a rival REPLACE), and again after SGLang has applied all
plugins' hooks, to find later rivals.

Never patch a function registered by its decorator at import, such as a route: the old function
would stay registered.

``series`` reads and places the patches, ``exact`` applies a diff, ``functions`` finds and
compiles changed functions, ``hooks`` installs and verifies them.
"""

from sglang_inflight.livepatch.hooks import PatchRefused, expect_hook, is_fork, verify_hooks
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
    write_fork,
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
    "write_fork",
]
