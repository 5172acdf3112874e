"""Protocols of SGLang's objects, with all members used by us in any process.

Here and in the folders ``sglang_types`` of ``scheduler`` and ``frontend``, each Protocol names one
class of SGLang's and the attributes and methods used by us, under SGLang's names and types. Our
code is annotated with Protocols and never with SGLang's own classes, so mypy refuses any other
member. A test, ``doctor`` and ``make port`` look for each named member in SGLang's source
(``sglang_inflight.porting``).
"""
