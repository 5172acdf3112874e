"""Does an SGLang fit what we say of it?

Everything here reads source, and imports nothing of the SGLang that it looks at. So the
installed one can be looked at, and one that was only unpacked: ``sglang-inflight doctor`` does
the first, ``make port VERSION=…`` the second. What we say of SGLang is in four places:

1. ``patches/``: the lines that we change;
2. the lists of hooks: functions, and the parameters that ours take of them;
3. the Protocols of ``sglang_types/`` folders: attributes and methods that we read, write or call;
4. the imports in our modules.
"""
