"""Check our assumptions about SGLang against a version's source.

This package reads source, and never imports the examined SGLang. So it can examine the installed
SGLang (``sglang-inflight doctor``) or one only unpacked (``make port VERSION=…``). Our assumptions
are in four places:

1. ``patches/``: lines changed by us;
2. the lists of hooks: functions, and the parameters our hooks take;
3. the Protocols in ``sglang_types/`` folders: attributes and methods used by us;
4. the imports in our modules.
"""
